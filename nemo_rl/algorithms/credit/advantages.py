"""Compute the advantage of each sampled token from the rewards of its group.

Invariants: baselines, deviations and whitening ignore samples without a reward (`valid_mask` 0). Baselines and
deviations include samples that only the loss excludes. Tokens that do not count in the loss get the advantage 0.

Legend: `B` samples, `T` tokens, `K` reward components, `N` response turns of the sample with the most turns.
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
from nemo_rl.algorithms.credit.turns import TurnCredit, per_token_of_turns, turn_advantage, with_total
from nemo_rl.config import (
    AdvantageEstimatorConfig,
    ClippedPGLossConfig,
    GRPOConfig,
    check_advantages,
    report_findings,
)
from nemo_rl.losses.divergence import kl_penalty
from nemo_rl.utils.errors import ConfigError, DataError
from nemo_rl.utils.named_parts import Registry

logger = logging.getLogger(__name__)


class AdvantageExtras(TypedDict, total=False):
    """Optional inputs of an estimator, in addition to prompts, rewards and mask."""

    group_ids: Tensor  # [B] int64; rows with equal ids are answers to one prompt
    valid_mask: Tensor  # [B]; 0 keeps a sample out of all statistics, since it has no reward
    reward_components: Mapping[str, Tensor]  # name -> [B]
    turn_rewards: Tensor  # [B, N] float64, environment's reward of each response turn; 0 after the last turn
    total_rewards: Tensor  # [B] float64, `rewards` before they were rounded to float32
    turn_spans: Tensor  # [B, N, 2] int64, first token and end of each response turn in the row; 0 after the last turn
    step_rewards: Tensor  # [B, S] float64, reward of each step, or of a turn without steps; if any turn has steps
    step_spans: Tensor  # [B, S, 2] int64, first token and end of each step, or of a turn without steps
    logprobs_policy: Tensor  # [B, T]
    logprobs_reference: Tensor  # [B, T]
    logprobs_teacher: Tensor  # [B, T], of the teacher of each sample; in runs with teachers


class AdvantageEstimator(Protocol):
    """Interface of objects that compute the advantages of tokens from rewards."""

    needs_logprobs: bool
    """Whether the estimator reads `logprobs_policy` and `logprobs_reference`."""

    def compute_advantage(
        self,
        prompt_ids: Tensor | None,
        rewards: Tensor,
        mask: Tensor,
        **extras: Unpack[AdvantageExtras],
    ) -> Tensor:
        """Compute the advantages of all samples of a step.

        Args:
            prompt_ids: `[B, T_prompt]` padded prompts; rows with equal prompts form a group. If `group_ids` is given,
                they are not read and may be None.
            rewards: `[B]` float.
            mask: `[B, T]`, non-zero on tokens that count in the loss; 0 everywhere in samples that the loss excludes.
            **extras: The fields of `AdvantageExtras`.

        Returns:
            `[B, T]` in the dtype of `rewards`, 0 wherever `mask` or `valid_mask` is 0.
        """
        ...


class GRPOAdvantageEstimator:
    """Group-relative advantages: GRPO, and with other settings RLOO and Dr.GRPO.

    GRPO (arXiv 2402.03300) computes `(r - mean) / std`, with the sample deviation of the group or batch. RLOO (arXiv
    2402.14740) subtracts a leave-one-out baseline, Dr.GRPO (arXiv 2503.20783) the mean. Neither divides by the
    deviation. Use Dr.GRPO with `loss_fn.constant_sample_length`, which divides all answers by the same length.
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
        """Compute `[B, T]` advantages, with the arguments of `AdvantageEstimator.compute_advantage`."""
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
    """REINFORCE leave-one-out, arXiv 2402.14740: `r - mean of the other rewards of the group`."""

    def __init__(self, estimator_config: AdvantageEstimatorConfig, loss_config: ClippedPGLossConfig) -> None:
        self.leave_one_out = True
        self.normalize = False


class DrGRPOAdvantageEstimator(GRPOAdvantageEstimator):
    """Dr.GRPO, arXiv 2503.20783: `r - mean of the group`, for use with `loss_fn.constant_sample_length`."""

    def __init__(self, estimator_config: AdvantageEstimatorConfig, loss_config: ClippedPGLossConfig) -> None:
        self.leave_one_out = False
        self.normalize = False


class PerTurnAdvantageEstimator:
    """Group-relative advantages of each response turn, with the baseline and the deviation of another estimator.

    See `nemo_rl.algorithms.credit.turns` for the formulas. If reward shaping changed the total reward of a sample, the
    difference is added to the reward of the sample's last turn.
    """

    needs_logprobs = False

    def __init__(self, inner: GRPOAdvantageEstimator, credit: TurnCredit, discount: float) -> None:
        self.inner = inner
        self.credit: TurnCredit = credit
        self.discount = discount

    def compute_advantage(
        self,
        prompt_ids: Tensor | None,
        rewards: Tensor,
        mask: Tensor,
        **extras: Unpack[AdvantageExtras],
    ) -> Tensor:
        """Compute advantages, which require rewards and spans of turns or steps (`AdvantageEstimator`).

        Raises:
            DataError: The rewards or spans were not given.
        """
        turn_rewards_BN, spans = self._rewarded(extras)
        if spans.shape[1] == 0:  # no sample has a turn
            return torch.zeros(mask.shape, dtype=rewards.dtype)
        group_ids_B, valid_B = _groups(prompt_ids, rewards, extras)
        has_turn_BN = (spans[..., 1] > 0) & (valid_B != 0)[:, None]
        turn_rewards_BN = torch.nn.functional.pad(turn_rewards_BN, (0, spans.shape[1] - turn_rewards_BN.shape[1]))
        advantage_BN = turn_advantage(
            with_total(turn_rewards_BN, has_turn_BN, extras.get("total_rewards", rewards)),
            has_turn_BN,
            group_ids_B,
            credit=self.credit,
            discount=self.discount,
            leave_one_out=self.inner.leave_one_out,
            normalize=self.inner.normalize,
            std_over_batch=self.inner.std_over_batch,
        )
        return per_token_of_turns(advantage_BN, spans, mask, rewards.dtype)

    def _rewarded(self, extras: AdvantageExtras) -> tuple[Tensor, Tensor]:
        """Return rewards `[B, N]` and spans `[B, N, 2]` of what gets credit: turns, or steps."""
        if self.credit != "step_rewards":
            if "turn_rewards" in extras and "turn_spans" in extras:
                return extras["turn_rewards"], extras["turn_spans"]
            raise DataError(
                f"grpo.adv_estimator.credit={self.credit} needs turn_rewards [B, N] and turn_spans [B, N, 2]; "
                "they were not given."
            )
        if "step_rewards" in extras and "step_spans" in extras:
            return extras["step_rewards"], extras["step_spans"]
        raise DataError(
            "grpo.adv_estimator.credit=step_rewards needs rewards of steps, and no sample of this step of training has "
            "any. Use an environment that gives them, such as env.reward_model with step_reward=each."
        )


class GDPOAdvantageEstimator:
    """Advantages from reward components, each normalised within its group, then added with weights.

    A component with a wide range of values therefore has no more influence than the others. The weighted sum is
    whitened over the samples of the batch that have a reward (sample deviation), so that its size does not depend on
    the number and range of components. Without `normalize_rewards`, only the weighted sum is normalised.
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
        """Compute advantages, which require `reward_components` (`AdvantageEstimator.compute_advantage`).

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
    """REINFORCE++ (arXiv 2501.03262): advantages whitened over all tokens of the batch that count in the loss.

    With `loss_fn.use_kl_in_reward` the advantage before whitening is `A_t = r - beta * KL_t`. With `kl_to_go`, `KL_t`
    is replaced by the sum of the KL of this token and of all later tokens that count, as in the paper. With
    `minus_baseline` the group's mean reward is subtracted from r first (REINFORCE++-baseline).
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
        """Compute `[B, T]` advantages, with the arguments of `AdvantageEstimator.compute_advantage`.

        Raises:
            DataError: The reward contains a KL penalty, but the log-probabilities are missing.
        """
        score_B, valid_B = self._scores(prompt_ids, rewards, extras)
        mask_BT = (mask != 0).double() * (valid_B != 0).double()[:, None]
        advantages_BT = score_B[:, None] * mask_BT
        if self.needs_logprobs:
            advantages_BT = advantages_BT - self._kl_penalty(mask_BT, extras)
        return whiten(advantages_BT, mask_BT, std_with_floor).to(rewards.dtype)

    def _scores(self, prompt_ids: Tensor | None, rewards: Tensor, extras: AdvantageExtras) -> tuple[Tensor, Tensor]:
        """Return the reward of each sample and the valid mask. With `minus_baseline` the group's mean is subtracted."""
        if not self.minus_baseline:
            valid_B = extras.get("valid_mask", torch.ones_like(rewards))
            return torch.where(valid_B != 0, rewards.double(), 0.0), valid_B
        group_ids_B, valid_B = _groups(prompt_ids, rewards, extras)
        score_B = group_advantage(rewards, group_ids_B, valid_B, leave_one_out=False, normalize=False)
        return score_B, valid_B

    def _kl_penalty(self, mask_BT: Tensor, extras: AdvantageExtras) -> Tensor:
        """Return the KL penalty of each token, which is subtracted from its reward, `[B, T]`."""
        if "logprobs_policy" not in extras or "logprobs_reference" not in extras:
            raise DataError(
                "loss_fn.use_kl_in_reward=true needs logprobs_policy and logprobs_reference when "
                "advantages are computed; they were not given."
            )
        logprobs, reference = extras["logprobs_policy"], extras["logprobs_reference"]
        penalty_BT = kl_penalty(logprobs, reference, mask_BT, self.loss_config)
        return penalty_BT.flip(-1).cumsum(-1).flip(-1) if self.kl_to_go else penalty_BT


class OPDAdvantageEstimator:
    """On-policy distillation from the sampled tokens: `A_t = w (log q(y_t) - log p(y_t))`, for teacher q and policy p.

    The policy gradient of these advantages is the gradient of `-w KL(p || q)` at each token, in expectation over its
    samples (MiniLLM, arXiv 2306.08543, equation 3, without the rewards of later tokens). With `reward_advantages`, the
    advantages of the rewards are added.
    """

    needs_logprobs = False

    def __init__(self, estimator_config: AdvantageEstimatorConfig, loss_config: ClippedPGLossConfig) -> None:
        self.weight = estimator_config.teacher_weight
        name = estimator_config.reward_advantages
        self.of_rewards: AdvantageEstimator | None = None
        if name != "none":
            built_in: Callable[..., AdvantageEstimator] = ESTIMATORS.class_of(name, "grpo.adv_estimator")
            self.of_rewards = built_in(estimator_config, loss_config)

    def compute_advantage(
        self,
        prompt_ids: Tensor | None,
        rewards: Tensor,
        mask: Tensor,
        **extras: Unpack[AdvantageExtras],
    ) -> Tensor:
        """Compute advantages, which require `logprobs_teacher` and `logprobs_policy`.

        Samples without a reward have the advantage of their teacher only.

        Raises:
            DataError: The log-probabilities were not given.
        """
        if "logprobs_teacher" not in extras or "logprobs_policy" not in extras:
            raise DataError(
                "grpo.adv_estimator.name=opd needs logprobs_teacher [B, T] and logprobs_policy [B, T]; they were not "
                "given."
            )
        gap_BT = extras["logprobs_teacher"].double() - extras["logprobs_policy"].double()
        advantages_BT = torch.where(mask != 0, self.weight * gap_BT, 0.0)
        if self.of_rewards is not None:
            advantages_BT = advantages_BT + self.of_rewards.compute_advantage(prompt_ids, rewards, mask, **extras)
        return advantages_BT.to(rewards.dtype)


class ClippedAdvantageEstimator:
    """Advantages of another estimator, clipped to `[low, high]`. A limit that is None is not applied."""

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
        """Compute the inner estimator's advantages and clip them."""
        advantages_BT = self.inner.compute_advantage(prompt_ids, rewards, mask, **extras)
        return advantages_BT.clamp(self.low, self.high)


ESTIMATORS: Registry[AdvantageEstimator] = Registry(
    "advantage estimator",
    AdvantageEstimator,
    {
        "grpo": f"{__name__}.GRPOAdvantageEstimator",
        "dr_grpo": f"{__name__}.DrGRPOAdvantageEstimator",
        "rloo": f"{__name__}.RLOOAdvantageEstimator",
        "gdpo": f"{__name__}.GDPOAdvantageEstimator",
        "reinforce_plus_plus": f"{__name__}.ReinforcePlusPlusAdvantageEstimator",
        "opd": f"{__name__}.OPDAdvantageEstimator",
    },
    attributes=("needs_logprobs",),
)
"""Estimators that `grpo.adv_estimator.name` may name. The built-in ones are constructed with the sections of the
estimator and of the loss; an estimator of the user is constructed with its `kwargs`."""


def make_advantage_estimator(grpo_config: GRPOConfig, loss_config: ClippedPGLossConfig) -> AdvantageEstimator:
    """Build the estimator that `grpo.adv_estimator.name` names, with clipping if configured.

    Raises:
        ConfigError: The name or its arguments cannot be used, or the estimator lacks an option that is set.
    """
    config = grpo_config.adv_estimator
    report_findings(check_advantages(grpo_config, loss_config))
    if config.name == "gdpo" and grpo_config.reward_shaping.enabled:
        logger.warning(
            "grpo.reward_shaping changes the total reward (filtered_reward) only; grpo.adv_estimator.name=gdpo "
            "computes advantages from reward components, which it leaves as they are."
        )
    estimator = _named_estimator(config, loss_config)
    low, high = grpo_config.advantage_clip_low, grpo_config.advantage_clip_high
    if low is None and high is None:
        return estimator
    return ClippedAdvantageEstimator(estimator, low, high)


def _named_estimator(config: AdvantageEstimatorConfig, loss_config: ClippedPGLossConfig) -> AdvantageEstimator:
    key = "grpo.adv_estimator"
    if ESTIMATORS.is_own(config.name):
        return ESTIMATORS.make(config.name, key, config.kwargs)
    built_in: Callable[..., AdvantageEstimator] = ESTIMATORS.class_of(config.name, f"{key}.name={config.name!r}")
    estimator = built_in(config, loss_config)
    if config.credit == "episode":
        return estimator
    assert isinstance(estimator, GRPOAdvantageEstimator), "check_advantages refuses others"
    return PerTurnAdvantageEstimator(estimator, config.credit, config.turn_discount)


def _groups(prompt_ids: Tensor | None, rewards: Tensor, extras: AdvantageExtras) -> tuple[Tensor, Tensor]:
    """Return group ids `[B]` and valid mask `[B]`, from the extras or their defaults."""
    valid_B = extras.get("valid_mask", torch.ones_like(rewards))
    if "group_ids" in extras:
        return extras["group_ids"], valid_B
    if prompt_ids is None:
        raise DataError("Advantages need prompt_ids or group_ids to know which samples belong to one group.")
    return group_ids_from_prompts(prompt_ids), valid_B


def _per_token(advantage_B: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the advantage of each sample at all of its tokens that count, `[B, T]`."""
    return torch.where(mask != 0, advantage_B.to(dtype)[:, None], 0.0)
