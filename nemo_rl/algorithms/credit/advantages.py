"""Advantages: what each sampled token is worth, from the rewards of its group.

Invariant: a sample whose `valid_mask` is 0 (it has no reward) enters no baseline, no deviation and no whitening; and an
advantage is 0 wherever the loss does not count. Samples that only the loss leaves out stay in baseline and deviation.

Legend: `B` samples, `T` tokens, `K` reward components.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from nemo_rl.algorithms.credit.group_statistics import (
    group_advantage,
    group_ids_from_prompts,
    sample_std_plus_epsilon,
    std_with_floor,
    whiten,
)
from nemo_rl.config import (
    AdvantageEstimatorConfig,
    ClippedPGLossConfig,
    GRPOConfig,
    check_advantages,
    report_findings,
)
from nemo_rl.losses.kl import calculate_kl
from nemo_rl.utils.errors import ConfigError, DataError

logger = logging.getLogger(__name__)


class AdvantageExtras(TypedDict, total=False):
    """What an estimator may use beside prompts, rewards and mask."""

    group_ids: Tensor  # [B] int64; rows with equal ids are answers to one prompt
    valid_mask: Tensor  # [B]; 0 keeps a sample out of all statistics, since it has no reward
    reward_components: Mapping[str, Tensor]  # name -> [B]
    logprobs_policy: Tensor  # [B, T]
    logprobs_reference: Tensor  # [B, T]


class AdvantageEstimator(Protocol):
    """Turns rewards into advantages per token.

    Attributes:
        needs_logprobs: Whether `logprobs_policy` and `logprobs_reference` must be given.
    """

    needs_logprobs: bool

    def compute_advantage(
        self,
        prompt_ids: Tensor | None,
        rewards: Tensor,
        mask: Tensor,
        **extras: Unpack[AdvantageExtras],
    ) -> Tensor:
        """Advantages of a whole step's samples.

        Args:
            prompt_ids: `[B, T_prompt]` padded prompts; rows with equal prompts form a group. May be
                None when `group_ids` is given, which decides then.
            rewards: `[B]` float.
            mask: `[B, T]`, non-zero where the loss counts: 0 on whole samples that it leaves out.
            **extras: See `AdvantageExtras`.

        Returns:
            `[B, T]` in the type of `rewards`, 0 wherever `mask` or `valid_mask` is 0.
        """
        ...


class GRPOAdvantageEstimator:
    """Group-relative advantages: GRPO, and RLOO and Dr.GRPO by their settings.

    GRPO (arXiv 2402.03300): `(r - mean) / std`, the deviation with n - 1, of the group or of the batch. RLOO (arXiv
    2402.14740): leave-one-out baseline, not normalised. Dr.GRPO (arXiv 2503.20783): mean baseline, not normalised; it
    belongs with `loss_fn.constant_sample_length`, which divides no answer by its own length.
    """

    needs_logprobs = False
    std_over_batch = False

    def __init__(self, estimator_config: AdvantageEstimatorConfig, loss_config: ClippedPGLossConfig) -> None:
        self.leave_one_out = estimator_config.use_leave_one_out_baseline
        self.normalize = estimator_config.normalize_rewards
        self.std_over_batch = estimator_config.std_level == "batch"

    def compute_advantage(
        self,
        prompt_ids: Tensor | None,
        rewards: Tensor,
        mask: Tensor,
        **extras: Unpack[AdvantageExtras],
    ) -> Tensor:
        """See `AdvantageEstimator.compute_advantage`."""
        group_ids_B, valid_B = _groups(prompt_ids, rewards, extras)
        advantage_B = group_advantage(
            rewards,
            group_ids_B,
            valid_B,
            leave_one_out=self.leave_one_out,
            normalize=self.normalize,
            std_over_batch=self.std_over_batch,
        )
        return _per_token(advantage_B, mask, rewards.dtype)


class RLOOAdvantageEstimator(GRPOAdvantageEstimator):
    """REINFORCE leave-one-out, arXiv 2402.14740: `r - mean of the others`."""

    def __init__(self, estimator_config: AdvantageEstimatorConfig, loss_config: ClippedPGLossConfig) -> None:
        self.leave_one_out = True
        self.normalize = False


class DrGRPOAdvantageEstimator(GRPOAdvantageEstimator):
    """Dr.GRPO, arXiv 2503.20783: `r - mean of the group`; use `loss_fn.constant_sample_length`."""

    def __init__(self, estimator_config: AdvantageEstimatorConfig, loss_config: ClippedPGLossConfig) -> None:
        self.leave_one_out = False
        self.normalize = False


class GDPOAdvantageEstimator:
    """Each reward component is normalised within its group, then they are added with weights.

    A component with a wide range cannot drown one with a narrow range. The weighted sum is whitened over the
    batch's samples that have a reward (sample deviation), which keeps its size the same for any number and range
    of components; without `normalize_rewards` that is the only normalisation.
    """

    needs_logprobs = False

    def __init__(self, estimator_config: AdvantageEstimatorConfig, loss_config: ClippedPGLossConfig) -> None:
        self.leave_one_out = estimator_config.use_leave_one_out_baseline
        self.normalize = estimator_config.normalize_rewards
        self.reward_weights = estimator_config.reward_weights

    def compute_advantage(
        self,
        prompt_ids: Tensor | None,
        rewards: Tensor,
        mask: Tensor,
        **extras: Unpack[AdvantageExtras],
    ) -> Tensor:
        """See `AdvantageEstimator.compute_advantage`; `reward_components` is required.

        Raises:
            DataError: No reward components were given.
            ConfigError: The number of weights differs from the number of components.
        """
        components = extras.get("reward_components")
        if not components:
            raise DataError(
                "grpo.adv_estimator.name=gdpo needs rewards by component; the environment returned "
                "one total reward. Return a dict of rewards, or use name=grpo."
            )
        weights_K = self._weights(list(components))
        group_ids_B, valid_B = _groups(prompt_ids, rewards, extras)
        advantage_B = torch.zeros_like(rewards, dtype=torch.float64)
        for weight, component_B in zip(weights_K, components.values(), strict=True):
            advantage_B += weight * group_advantage(
                component_B,
                group_ids_B,
                valid_B,
                leave_one_out=self.leave_one_out,
                normalize=self.normalize,
            )
        return _per_token(whiten(advantage_B, valid_B, sample_std_plus_epsilon), mask, rewards.dtype)

    def _weights(self, names: list[str]) -> list[float]:
        weights_K = self.reward_weights
        if weights_K is None:
            return [1.0] * len(names)
        if len(weights_K) != len(names):
            raise ConfigError(
                f"grpo.adv_estimator.reward_weights has {len(weights_K)} values for "
                f"{len(names)} reward components ({', '.join(names)}); give one per component."
            )
        return list(weights_K)


class ReinforcePlusPlusAdvantageEstimator:
    """REINFORCE++, arXiv 2501.03262: whitened over all tokens of the batch that count in the loss.

    A_t = r - beta * KL_t with `loss_fn.use_kl_in_reward`; with `kl_to_go` the sum of the KL of this and all later
    tokens that count, as in the paper, instead of KL_t. With `minus_baseline` the group's mean reward is subtracted
    from r first (REINFORCE++-baseline).
    """

    def __init__(self, estimator_config: AdvantageEstimatorConfig, loss_config: ClippedPGLossConfig) -> None:
        self.minus_baseline = estimator_config.minus_baseline
        self.kl_to_go = estimator_config.kl_to_go
        self.loss_config = loss_config
        self.needs_logprobs = loss_config.use_kl_in_reward and loss_config.reference_policy_kl_penalty != 0

    def compute_advantage(
        self,
        prompt_ids: Tensor | None,
        rewards: Tensor,
        mask: Tensor,
        **extras: Unpack[AdvantageExtras],
    ) -> Tensor:
        """See `AdvantageEstimator.compute_advantage`.

        Raises:
            DataError: KL belongs in the reward and the log-probabilities are missing.
        """
        score_B, valid_B = self._scores(prompt_ids, rewards, extras)
        mask_BT = (mask != 0).double() * (valid_B != 0).double()[:, None]
        advantages_BT = score_B[:, None] * mask_BT
        if self.needs_logprobs:
            advantages_BT = advantages_BT - self._kl_penalty(mask_BT, extras)
        return whiten(advantages_BT, mask_BT, std_with_floor).to(rewards.dtype)

    def _scores(self, prompt_ids: Tensor | None, rewards: Tensor, extras: AdvantageExtras) -> tuple[Tensor, Tensor]:
        """Reward of each sample, minus its group's mean if asked, and the valid mask."""
        if not self.minus_baseline:
            valid_B = extras.get("valid_mask", torch.ones_like(rewards))
            return torch.where(valid_B != 0, rewards.double(), 0.0), valid_B
        group_ids_B, valid_B = _groups(prompt_ids, rewards, extras)
        score_B = group_advantage(rewards, group_ids_B, valid_B, leave_one_out=False, normalize=False)
        return score_B, valid_B

    def _kl_penalty(self, mask_BT: Tensor, extras: AdvantageExtras) -> Tensor:
        """What the KL estimates take from each token's reward, `[B, T]`."""
        if "logprobs_policy" not in extras or "logprobs_reference" not in extras:
            raise DataError(
                "loss_fn.use_kl_in_reward=true needs logprobs_policy and logprobs_reference when "
                "advantages are computed; they were not given."
            )
        kl_BT = calculate_kl(
            torch.where(mask_BT != 0, extras["logprobs_policy"].double(), 0.0),
            torch.where(mask_BT != 0, extras["logprobs_reference"].double(), 0.0),
            self.loss_config.reference_policy_kl_type,
            self.loss_config.kl_input_clamp_value,
            self.loss_config.kl_output_clamp_value,
        )
        if self.kl_to_go:
            kl_BT = kl_BT.flip(-1).cumsum(-1).flip(-1)
        return self.loss_config.reference_policy_kl_penalty * kl_BT


class ClippedAdvantageEstimator:
    """Limits another estimator's advantages to `[low, high]`; None leaves that side open."""

    def __init__(self, inner: AdvantageEstimator, low: float | None, high: float | None) -> None:
        self.inner = inner
        self.low = low
        self.high = high
        self.needs_logprobs = inner.needs_logprobs

    def compute_advantage(
        self,
        prompt_ids: Tensor | None,
        rewards: Tensor,
        mask: Tensor,
        **extras: Unpack[AdvantageExtras],
    ) -> Tensor:
        """See `AdvantageEstimator.compute_advantage`."""
        advantages_BT = self.inner.compute_advantage(prompt_ids, rewards, mask, **extras)
        return advantages_BT.clamp(self.low, self.high)


type EstimatorFactory = Callable[[AdvantageEstimatorConfig, ClippedPGLossConfig], AdvantageEstimator]

ESTIMATORS: dict[str, EstimatorFactory] = {
    "grpo": GRPOAdvantageEstimator,
    "dr_grpo": DrGRPOAdvantageEstimator,
    "rloo": RLOOAdvantageEstimator,
    "gdpo": GDPOAdvantageEstimator,
    "reinforce_plus_plus": ReinforcePlusPlusAdvantageEstimator,
}


def make_advantage_estimator(grpo_config: GRPOConfig, loss_config: ClippedPGLossConfig) -> AdvantageEstimator:
    """Build the estimator that `grpo.adv_estimator.name` asks for, with clipping if configured.

    Raises:
        ConfigError: Unknown name, or an option that the chosen estimator does not have.
    """
    config = grpo_config.adv_estimator
    if config.name not in ESTIMATORS:
        raise ConfigError(f"grpo.adv_estimator.name={config.name!r} is unknown; choose one of {', '.join(ESTIMATORS)}.")
    report_findings(check_advantages(grpo_config, loss_config))
    if config.name == "gdpo" and grpo_config.reward_shaping.enabled:
        logger.warning(
            "grpo.reward_shaping changes the total reward (filtered_reward); the advantages of "
            "grpo.adv_estimator.name=gdpo are made of reward components, which it leaves as they are."
        )
    estimator = ESTIMATORS[config.name](config, loss_config)
    low, high = grpo_config.advantage_clip_low, grpo_config.advantage_clip_high
    if low is None and high is None:
        return estimator
    return ClippedAdvantageEstimator(estimator, low, high)


def _groups(prompt_ids: Tensor | None, rewards: Tensor, extras: AdvantageExtras) -> tuple[Tensor, Tensor]:
    """Group ids `[B]` and valid mask `[B]`, from the extras or their fallbacks."""
    valid_B = extras.get("valid_mask", torch.ones_like(rewards))
    if "group_ids" in extras:
        return extras["group_ids"], valid_B
    if prompt_ids is None:
        raise DataError("Advantages need prompt_ids or group_ids to tell which samples compete.")
    return group_ids_from_prompts(prompt_ids), valid_B


def _per_token(advantage_B: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The sample's advantage on each of its tokens that count, `[B, T]`."""
    return torch.where(mask != 0, advantage_B[:, None], 0.0).to(dtype)
