"""Compute the advantages and returns of tokens in PPO, from the rewards of samples and the values of a critic.

Generalised advantage estimation (arXiv 1506.02438) is a pure function of rewards and values.

Legend: `B` samples, `T` tokens of a row, `N` largest number of tokens that count in a sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from nemo_rl.algorithms.credit.group_statistics import sample_std_with_floor, spread, whiten
from nemo_rl.algorithms.credit.joined_rows import JoinedRows
from nemo_rl.algorithms.credit.reward_shaping import slope, training_rewards
from nemo_rl.algorithms.credit.turns import last_token_of_turns, padded_rewards
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.config import ClippedPGLossConfig, PPOAdvantageConfig, PPOConfig
from nemo_rl.experience.trajectory import Trajectory, is_right
from nemo_rl.losses.divergence import kl_penalty
from nemo_rl.losses.reductions import masked_mean, masked_var, safe_divide


@dataclass(frozen=True)
class CountedTokens:
    """The tokens of each sample that count, moved to the left without gaps."""

    shape: tuple[int, int]
    """The sizes `B` and `T`."""
    order_BN: Tensor
    """Index in its row of each token that counts."""
    exists_BN: Tensor
    """True for positions that hold such a token, False after the sample's last one."""

    @classmethod
    def of(cls, mask_BT: Tensor) -> Self:
        """Find the tokens whose mask is not 0."""
        counted_BT = mask_BT != 0
        most = int(counted_BT.sum(1).max()) if counted_BT.numel() else 0
        order_BN = counted_BT.int().argsort(dim=1, descending=True, stable=True)[:, :most]
        return cls((mask_BT.shape[0], mask_BT.shape[1]), order_BN, counted_BT.gather(1, order_BN))

    @property
    def lengths_B(self) -> Tensor:
        """The number of tokens of each sample, int64."""
        return self.exists_BN.sum(1)

    @property
    def is_last_BN(self) -> Tensor:
        """True on the last token of each sample."""
        after_BN = torch.nn.functional.pad(self.exists_BN[:, 1:], (0, 1), value=False)
        return self.exists_BN & ~after_BN

    def take(self, values_BT: Tensor) -> Tensor:
        """Return values of the tokens that count as `[B, N]` float64, 0 after the last token of a sample."""
        return torch.where(self.exists_BN, values_BT.gather(1, self.order_BN).double(), 0.0)

    def put(self, values_BN: Tensor) -> Tensor:
        """Write values of the tokens that count to their positions in the rows, `[B, T]`, with 0 elsewhere."""
        kept_BN = torch.where(self.exists_BN, values_BN, 0.0)
        return kept_BN.new_zeros(self.shape).scatter_(1, self.order_BN, kept_BN)


def gae(
    tokens: CountedTokens, rewards_BN: Tensor, values_BN: Tensor, *, after_B: Tensor, gamma: float, lambda_B: Tensor
) -> Tensor:
    """Return the advantage of each token, `[B, N]` float64.

    Args:
        tokens: The tokens that count. It contains the number of tokens of each sample.
        rewards_BN: Reward of each token, in the layout of `tokens.take`.
        values_BN: Value of the state before each token, in the same layout.
        after_B: Value of the state after the last token of each sample; 0 for a finished answer.
        gamma: Discount for each token.
        lambda_B: Lambda of each sample.

    Example:
        >>> tokens = CountedTokens.of(torch.ones(1, 2))
        >>> rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]])
        >>> gae(tokens, rewards, values, after_B=torch.zeros(1), gamma=1.0, lambda_B=torch.tensor([0.5]))
        tensor([[0.2500, 0.5000]], dtype=torch.float64)
    """
    next_BN = torch.nn.functional.pad(values_BN[:, 1:].double(), (0, 1))
    next_BN = torch.where(tokens.is_last_BN, after_B.double()[:, None], next_BN)
    # # The loop over tokens uses numpy, whose operations on a few numbers are several times faster than torch's.
    deltas_NB = np.ascontiguousarray((rewards_BN.double() + gamma * next_BN - values_BN.double()).T.numpy())
    decay_B, sums_B = gamma * lambda_B.double().numpy(), np.zeros(deltas_NB.shape[1])
    for token in reversed(range(len(deltas_NB))):
        sums_B = deltas_NB[token] + decay_B * sums_B
        deltas_NB[token] = sums_B
    return torch.from_numpy(deltas_NB).T


def length_adaptive_lambda(lengths_B: Tensor, alpha: float) -> Tensor:
    """Return `1 - 1 / (alpha * length)` of each sample, at least 0: VAPO, arXiv 2504.05118, section 4.1.

    Example:
        >>> length_adaptive_lambda(torch.tensor([100, 10]), 0.05)
        tensor([0.8000, 0.0000], dtype=torch.float64)
    """
    return (1 - 1 / (alpha * lengths_B.double().clamp(min=1))).clamp(min=0)


class GeneralizedAdvantageEstimator:
    """Generalised advantage estimation with different lambdas for the policy's advantages and the critic's returns.

    Args:
        estimator_config: The section `ppo.adv_estimator`. A dict is checked, and missing values get their defaults.
        loss_config: The section `loss_fn`, for a KL penalty in the reward. A dict is checked and completed too.

    Raises:
        ConfigError: A value is out of range.
    """

    needs_values = True
    """Whether the advantages depend on the values."""

    def __init__(
        self,
        estimator_config: PPOAdvantageConfig | Mapping[str, Any],
        loss_config: ClippedPGLossConfig | Mapping[str, Any],
    ) -> None:
        self._config = PPOAdvantageConfig.of(estimator_config)
        self._loss_config = ClippedPGLossConfig.of(loss_config)
        self.needs_logprobs = self._loss_config.use_kl_in_reward and self._loss_config.reference_policy_kl_penalty != 0
        """Whether the reward of a token contains a KL penalty."""

    def compute_advantage(
        self,
        prompt_ids: Tensor | None,
        rewards: Tensor,
        mask: Tensor,
        values: Tensor | None = None,
        reference_logprobs: Tensor | None = None,
        logprobs: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the advantage of each token, `[B, T]` float32. The last token of a sample gets its reward.

        Args:
            prompt_ids: Not used. Other estimators use it to find the answers to the same prompt.
            rewards: `[B]`, the reward of each sample. All answers are treated as finished.
            mask: `[B, T]`, non-zero on tokens that count.
            values: `[B, T]`, the value of the state before each token. Required if `needs_values`.
            reference_logprobs: `[B, T]` values of the reference policy. Required for a KL penalty in the reward.
            logprobs: `[B, T]` log-probabilities of the policy. Required for a KL penalty in the reward.

        Raises:
            ValueError: Required values or log-probabilities are missing.
        """
        tokens = CountedTokens.of(mask)
        rewards_BN = torch.where(tokens.is_last_BN, rewards.double()[:, None], 0.0)
        if self.needs_logprobs:
            if logprobs is None or reference_logprobs is None:
                raise ValueError("loss_fn.use_kl_in_reward=true needs logprobs [B, T] and reference_logprobs [B, T].")
            rewards_BN = rewards_BN - self.kl_penalty(tokens, logprobs, reference_logprobs)
        if values is None and self.needs_values:
            raise ValueError(f"{type(self).__name__} needs values [B, T], the values of the states before the tokens.")
        values_BN = torch.zeros_like(rewards_BN) if values is None else tokens.take(values)
        advantages_BN = self.estimate(tokens, rewards_BN, values_BN, torch.zeros(len(rewards)))[0]
        return tokens.put(advantages_BN).float()

    def kl_penalty(self, tokens: CountedTokens, policy_BT: Tensor, reference_BT: Tensor) -> Tensor:
        """Return the penalty on each token's reward for the distance from the reference policy, `[B, N]`."""
        policy_BN, reference_BN = tokens.take(policy_BT), tokens.take(reference_BT)
        return kl_penalty(policy_BN, reference_BN, tokens.exists_BN, self._loss_config)

    def estimate(
        self, tokens: CountedTokens, rewards_BN: Tensor, values_BN: Tensor, after_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return advantages of the policy and returns of the critic, `[B, N]` float64 each.

        Args:
            values_BN: the value of the state before each token.
            after_B: the value of the state after the last token of each sample.
        """
        config = self._config
        lambda_value = config.gae_lambda if config.gae_lambda_value is None else config.gae_lambda_value
        returns_BN = self._gae(tokens, rewards_BN, values_BN, after_B, _each(tokens, lambda_value)) + values_BN
        states_BN = values_BN if self.needs_values else torch.zeros_like(values_BN)
        advantages_BN = self._gae(tokens, rewards_BN, states_BN, after_B, self._policy_lambda(tokens))
        if config.normalize_advantages:
            advantages_BN = whiten(advantages_BN, tokens.exists_BN, sample_std_with_floor)
        return advantages_BN, returns_BN

    def _policy_lambda(self, tokens: CountedTokens) -> Tensor:
        """Return the lambda for the policy's advantages of each sample, `[B]`."""
        config = self._config
        if config.length_adaptive_alpha:
            return length_adaptive_lambda(tokens.lengths_B, config.length_adaptive_alpha)
        return _each(tokens, config.gae_lambda if config.gae_lambda_policy is None else config.gae_lambda_policy)

    def _gae(
        self, tokens: CountedTokens, rewards_BN: Tensor, states_BN: Tensor, after_B: Tensor, lambda_B: Tensor
    ) -> Tensor:
        gamma = self._config.gae_gamma
        return gae(tokens, rewards_BN, states_BN, after_B=after_B, gamma=gamma, lambda_B=lambda_B)


class RawRewardAdvantageEstimator(GeneralizedAdvantageEstimator):
    """Advantages that are discounted sums of rewards, as if all values were 0 and lambda were 1."""

    needs_values = False

    def _policy_lambda(self, tokens: CountedTokens) -> Tensor:
        return _each(tokens, 1.0)


TOKEN_ESTIMATORS = {"gae": GeneralizedAdvantageEstimator, "raw_reward": RawRewardAdvantageEstimator}
"""The estimators that `ppo.adv_estimator.name` names."""


def _each(tokens: CountedTokens, value: float) -> Tensor:
    """Return `value`, repeated for each sample, as `[B]` float64."""
    return torch.full((len(tokens.lengths_B),), value, dtype=torch.float64)


class TokenCredit:
    """Stage that writes advantages and returns of tokens into a batch (`runtime.run.Stage`).

    A sample with several conversations is one sequence, which holds the tokens of all conversations in their order
    (`credit.joined_rows`).

    Args:
        config: the section `ppo`.
        loss_config: the section `loss_fn`, for a KL penalty in the reward.
    """

    name = "advantage_calculation"
    roles: tuple[str, ...] = ()

    def __init__(self, config: PPOConfig, loss_config: ClippedPGLossConfig) -> None:
        self._config = config
        self._estimator = TOKEN_ESTIMATORS[config.adv_estimator.name](config.adv_estimator, loss_config)
        self.needs_logprobs = self._estimator.needs_logprobs

    def apply(self, batch: StepBatch) -> dict[str, float]:
        """Write `advantages [R, T]`, `returns [R, T]` and `positive_examples [R]`.

        The batch must hold `values`. With `bootstrap_truncated` it must also hold `values_after`, and with a KL penalty
        in the reward `prev_logprobs` and `reference_policy_logprobs`.

        Returns:
            Metrics: rewards of the samples, advantages, returns and values of the tokens that count, and
            `critic/explained_var`, the share of the variance of the returns that the values explain.
        """
        tensors, trajectories = batch.tensors, batch.trajectories
        joined = JoinedRows.of(trajectories, tensors["input_lengths"])
        mask_RT = tensors["token_mask"] * tensors["sample_mask"][:, None]
        mask_BT = joined.join(mask_RT)
        tokens = CountedTokens.of(mask_BT)
        values_BN = tokens.take(joined.join(tensors["values"]))
        rewards_B = training_rewards(trajectories, self._config)
        rewards_BN = self._turn_rewards(trajectories, rewards_B, tokens, mask_BT)
        if self.needs_logprobs:
            policy_BT, reference_BT = (
                joined.join(tensors[f"{name}_logprobs"]) for name in ("prev", "reference_policy")
            )
            rewards_BN = rewards_BN - self._estimator.kl_penalty(tokens, policy_BT, reference_BT)
        after_B = torch.zeros(len(trajectories))
        if self._config.adv_estimator.bootstrap_truncated:
            after_B = joined.last(tensors["values_after"])
        advantages_BN, returns_BN = self._estimator.estimate(tokens, rewards_BN, values_BN, after_B)
        advantages_RT = joined.cut(tokens.put(advantages_BN))
        tensors["advantages"] = advantages_RT.float()
        tensors["returns"] = joined.cut(tokens.put(returns_BN)).float()
        positive_B = torch.tensor([float(is_right(t.penalized_reward)) for t in trajectories])
        tensors["positive_examples"] = joined.repeat(positive_B)
        return {
            "filtered_reward": float(masked_mean(rewards_B, joined.largest(tensors["sample_mask"]))),
            **spread("advantages", advantages_RT, mask_RT),
            **_value_metrics(tokens, values_BN, returns_BN),
        }

    def _turn_rewards(
        self, trajectories: Sequence[Trajectory], rewards_B: Tensor, tokens: CountedTokens, mask_BT: Tensor
    ) -> Tensor:
        """Return the reward of each token, `[B, N]` float64, with the reward of a turn or step at its last token.

        The last token of a sample gets the rest of `rewards_B`: the reward of the last turn or step, the rewards of
        turns without a token that counts, and the part of the reward that belongs to no turn.
        """
        spans, earned_BM = padded_rewards(trajectories)
        token_BM = last_token_of_turns(spans, mask_BT)
        is_before_BM = (token_BM >= 0) & (token_BM < tokens.lengths_B[:, None] - 1)
        earned_BM = torch.where(is_before_BM, earned_BM * slope(self._config.reward_scaling), 0.0)
        rewards_BN = torch.zeros(tokens.exists_BN.shape, dtype=torch.float64)
        if earned_BM.any():
            rewards_BN.scatter_add_(1, token_BM.clamp(min=0), earned_BM)
        left_B = rewards_B.double() - earned_BM.sum(1)
        return torch.where(tokens.is_last_BN, left_B[:, None], rewards_BN)


def _value_metrics(tokens: CountedTokens, values_BN: Tensor, returns_BN: Tensor) -> dict[str, float]:
    """Return the metrics of the critic before its update. A value that cannot be computed is 0."""
    kept_BN = tokens.exists_BN.double()
    if not tokens.exists_BN.any():
        names = ("returns_mean", "values_mean", "values_min", "values_max", "critic/explained_var")
        return dict.fromkeys(names, 0.0)
    variance = masked_var(returns_BN, kept_BN, unbiased=False)
    unexplained = masked_var(returns_BN - values_BN, kept_BN, unbiased=False)
    values = values_BN[tokens.exists_BN]
    return {
        "returns_mean": float(masked_mean(returns_BN, kept_BN)),
        "values_mean": float(values.mean()),
        "values_min": float(values.min()),
        "values_max": float(values.max()),
        "critic/explained_var": float(safe_divide(variance - unexplained, variance)),
    }
