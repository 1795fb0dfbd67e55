"""Estimators of advantages of tokens, and of the returns that a critic is trained on: those of PPO.

    gae          generalised advantage estimation from the values of a critic (`credit.gae`)
    raw_reward   the discounted sum of the rewards from a token on; the critic is trained all the same

Legend: `B` samples, `T` tokens of a row, `N` tokens that count of the sample with most.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_rl.algorithms.credit.gae import CountedTokens, gae, length_adaptive_lambda
from nemo_rl.algorithms.credit.group_statistics import sample_std_with_floor, whiten
from nemo_rl.config import ClippedPGLossConfig, PPOAdvantageConfig
from nemo_rl.losses.kl import kl_penalty


class GeneralizedAdvantageEstimator:
    """Advantages with the policy's lambda, and returns with the critic's.

    Args:
        estimator_config: the section `ppo.adv_estimator`; a dict is checked and filled in.
        loss_config: the section `loss_fn`, for a KL penalty in the reward; a dict is checked and filled in.

    Raises:
        ConfigError: a value is out of range.
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
        """Return the advantage of each token, `[B, T]` float32, for rewards at the ends of finished answers.

        Args:
            prompt_ids: not used; other estimators compare the answers to a prompt.
            rewards: `[B]`, of the samples.
            mask: `[B, T]`, non-zero on tokens that count.
            values: `[B, T]`, of the state before each token; only `needs_values` needs them.
            reference_logprobs: `[B, T]`, of the reference policy; for a KL penalty in the reward.
            logprobs: `[B, T]`, of the policy; for a KL penalty in the reward.

        Raises:
            ValueError: values or log-probabilities that are needed are missing.
        """
        tokens = CountedTokens.of(mask)
        rewards_BN = torch.where(tokens.is_last_BN, rewards.double()[:, None], 0.0)
        if self.needs_logprobs:
            if logprobs is None or reference_logprobs is None:
                raise ValueError("loss_fn.use_kl_in_reward=true needs logprobs [B, T] and reference_logprobs [B, T].")
            rewards_BN = rewards_BN - self.kl_penalty(tokens, logprobs, reference_logprobs)
        if values is None and self.needs_values:
            raise ValueError(f"{type(self).__name__} needs values [B, T], those of the states before the tokens.")
        values_BN = torch.zeros_like(rewards_BN) if values is None else tokens.take(values)
        advantages_BN = self.estimate(tokens, rewards_BN, values_BN, torch.zeros(len(rewards)))[0]
        return tokens.put(advantages_BN).float()

    def kl_penalty(self, tokens: CountedTokens, policy_BT: Tensor, reference_BT: Tensor) -> Tensor:
        """Return what the distance from the reference policy takes off the reward of each token, `[B, N]`."""
        policy_BN, reference_BN = tokens.take(policy_BT), tokens.take(reference_BT)
        return kl_penalty(policy_BN, reference_BN, tokens.exists_BN, self._loss_config)

    def estimate(
        self, tokens: CountedTokens, rewards_BN: Tensor, values_BN: Tensor, after_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return advantages of the policy and returns of the critic, `[B, N]` float64 each.

        Args:
            tokens: the tokens of the samples.
            rewards_BN: the reward of each token.
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
        """Return lambda of the policy's advantages, `[B]`."""
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
    """Advantages that are discounted sums of rewards: those of values of 0 with lambda 1."""

    needs_values = False

    def _policy_lambda(self, tokens: CountedTokens) -> Tensor:
        return _each(tokens, 1.0)


TOKEN_ESTIMATORS = {"gae": GeneralizedAdvantageEstimator, "raw_reward": RawRewardAdvantageEstimator}
"""The estimators that `ppo.adv_estimator.name` names."""


def _each(tokens: CountedTokens, value: float) -> Tensor:
    """Return the same number for each sample, `[B]` float64."""
    return torch.full((len(tokens.lengths_B),), value, dtype=torch.float64)
