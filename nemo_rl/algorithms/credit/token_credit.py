"""Turn the rewards of samples and the values of a critic into advantages and returns of tokens.

    rewards of turns ─► reward of each token ──► advantages of the policy, lambda_policy ─► whitened
    of a sample         (last one of each turn;  returns of the critic, lambda_value: advantage + value
                         minus KL)

What scaling, shaping and penalties change of a sample's reward is at its last token, so that the rewards of its tokens
always sum to its own. The value of a state is a number at the token that follows it: position t holds the value before
token t. Invariant: a sample that the loss leaves out has advantages and returns of 0 and enters no statistic.

Legend: `R` rows, `B` samples, `T` tokens, `N` tokens that count of the sample with most, `M` turns of the sample with
most.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_rl.algorithms.credit.gae import CountedTokens
from nemo_rl.algorithms.credit.group_statistics import spread
from nemo_rl.algorithms.credit.joined_rows import JoinedRows
from nemo_rl.algorithms.credit.reward_shaping import slope, training_rewards
from nemo_rl.algorithms.credit.token_estimators import TOKEN_ESTIMATORS
from nemo_rl.algorithms.credit.turns import last_token_of_turns, padded
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.config import ClippedPGLossConfig, PPOConfig
from nemo_rl.experience.trajectory import Trajectory, is_right
from nemo_rl.losses.reductions import masked_mean, masked_var, safe_divide


class TokenCredit:
    """The stage that writes advantages and returns of tokens into a batch; a `runtime.run.Stage`.

    A sample with several conversations is one sequence: its tokens are those of all of them, in their order
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

        Needs `values`, with `bootstrap_truncated` also `values_after`, and with a KL penalty in the reward
        `prev_logprobs` and `reference_policy_logprobs`.

        Returns:
            Metrics: rewards of the samples, advantages, returns and values of the tokens that count, and
            `critic/explained_var`, the share of the variance of the returns that the values explain.
        """
        tensors, trajectories = batch.tensors, batch.trajectories
        joined = JoinedRows.of(trajectories, tensors)
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
        """Return the reward of each token, `[B, N]` float64: that of a turn at its last token.

        The last token of a sample gets what is left of `rewards_B`: the reward of the last turn, of turns without a
        token that counts, and what is not a turn's own.
        """
        spans = padded([t.turn_spans for t in trajectories], (0, 0), torch.int64)
        earned_BM = padded([t.penalized_turn_rewards for t in trajectories], 0.0, torch.float64)
        earned_BM = torch.nn.functional.pad(earned_BM, (0, spans.shape[1] - earned_BM.shape[1]))
        token_BM = last_token_of_turns(spans, mask_BT)
        is_before_BM = (token_BM >= 0) & (token_BM < tokens.lengths_B[:, None] - 1)
        earned_BM = torch.where(is_before_BM, earned_BM * slope(self._config.reward_scaling), 0.0)
        rewards_BN = torch.zeros(tokens.exists_BN.shape, dtype=torch.float64)
        if earned_BM.any():
            rewards_BN.scatter_add_(1, token_BM.clamp(min=0), earned_BM)
        left_B = rewards_B.double() - earned_BM.sum(1)
        return torch.where(tokens.is_last_BN, left_B[:, None], rewards_BN)


def _value_metrics(tokens: CountedTokens, values_BN: Tensor, returns_BN: Tensor) -> dict[str, float]:
    """Return the metrics of the critic before its update; 0 where no token counts, or where all returns are equal."""
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
