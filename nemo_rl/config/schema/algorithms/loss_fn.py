"""Define the keys of `loss_fn` for policy-gradient losses (GRPO, PPO, DAPO, GSPO, CISPO, REINFORCE++).

Rules between keys are in `config.rules.training`. Invariant: each key only selects a formula.
"""

from typing import Annotated, Literal

from pydantic import Field

from nemo_rl.config.base.availability import OnlyWith
from nemo_rl.config.base.names import PartName
from nemo_rl.config.base.value_types import Factor, FactorOrZero, Number
from nemo_rl.config.schema.named_part import NamedPartConfig

_WITH_KL = OnlyWith("reference_policy_kl_penalty")

_WITH_CORRECTION = OnlyWith("use_importance_sampling_correction")

_WITH_RATIO = OnlyWith("disable_ppo_ratio", (False,))


class ClippedPGLossConfig(NamedPartConfig):
    """The clipped policy-gradient loss."""

    name: Annotated[str, PartName(("clipped_pg",))] = "clipped_pg"
    """clipped_pg: the loss that the keys below describe; or the dotted path of a class. For a class, these keys only
    decide whether its batches contain reference_policy_logprobs: if reference_policy_kl_penalty is not 0."""
    reference_policy_kl_penalty: Number = 0.01
    """Weight of the KL term relative to the reference policy. 0 disables it, and a negative weight moves the policy
    away from the reference. With top_k or top_p, both distributions are filtered (in NeMo RL, neither is), so that the
    KL is that of the sampled distribution."""
    reference_policy_kl_type: Annotated[Literal["k1", "k2", "k3"], _WITH_KL] = "k3"
    """Estimator of the per-token KL divergence. In expectation, the gradients of k1 and k3 equal that of the
    divergence, and the gradient of k2 is about twice as large."""
    kl_input_clamp_value: Annotated[FactorOrZero | None, _WITH_KL] = 20.0
    """Bound in nats of the log ratio before the KL estimator. A token beyond it gets no gradient from the KL term.
    null: no bound."""
    kl_output_clamp_value: Annotated[FactorOrZero | None, _WITH_KL] = 10.0
    """Bound in nats of a token's weighted KL estimate. A token beyond it gets no gradient from the KL term. null: no
    bound."""
    use_on_policy_kl_approximation: Annotated[bool, _WITH_KL] = False
    """Weight the KL term, before its output clamp, by the ratio of current to generation probabilities."""
    sequence_level_kl_weight: Annotated[bool, _WITH_KL] = False
    """Weight the KL term by the geometric mean of the ratio over the sequence instead of each token's ratio. With
    use_on_policy_kl_approximation the mean is the weight; without it the weight is 1, with the mean's gradient."""
    use_kl_in_reward: Annotated[bool, _WITH_KL] = False
    """Subtract the KL term from the reward instead of adding it to the loss."""
    ratio_clip_min: FactorOrZero = 0.2
    """Lower clip epsilon: the ratio is clipped below 1 - ratio_clip_min. With 1 or more, it is never clipped."""
    ratio_clip_max: Annotated[float, Field(gt=-1, le=1e9)] = 0.2
    """Upper clip epsilon: the ratio is clipped above 1 + ratio_clip_max; below 0 only with use_cispo."""
    ratio_clip_c: Annotated[Annotated[float, Field(gt=1, le=1e9)] | None, _WITH_RATIO] = None
    """Dual-clip bound for negative advantages, greater than 1; null: no dual clip."""
    disable_ppo_ratio: bool = False
    """Use the REINFORCE loss -A log p, without ratio and clipping. ratio_clip_c then has no effect, and
    sequence_level_importance_ratios changes only the correction weights. With force_on_policy_ratio the value of the
    loss is -A, and the gradient is the same."""
    force_on_policy_ratio: bool = False
    """Set the ratio to exactly 1. This requires one optimizer update per rollout batch."""
    use_cispo: bool = False
    """CISPO: clip the importance weight and stop its gradient, but keep all tokens. This requires token_level_loss."""
    sequence_level_importance_ratios: bool = False
    """GSPO: one ratio per sequence (the geometric mean over its tokens) and one correction weight per sequence (the
    product over its tokens). This requires token_level_loss=false."""
    token_level_loss: bool = True
    """true: average the loss over all tokens; false: average over the tokens of each sequence, then over sequences."""
    constant_sample_length: Factor | None = None
    """Dr.GRPO: divide the sum over tokens by this number of tokens for each sample that counts, for example
    max_new_tokens, instead of by the number of tokens that count; null: off."""
    use_importance_sampling_correction: bool = False
    """Weight each token by the ratio of its training to its generation probability, to correct their mismatch."""
    truncated_importance_sampling_type: Annotated[Literal["tis", "icepop", "seq-mask-tis"] | None, _WITH_CORRECTION] = (
        None
    )
    """Treatment of correction weights beyond the bounds: tis clamps them, icepop sets the token's weight to 0,
    seq-mask-tis sets the whole sequence's weight to 0; null: no bounds."""
    truncated_importance_sampling_ratio: Annotated[Factor | None, _WITH_CORRECTION] = None
    """Upper bound of the correction weight, required by every type."""
    truncated_importance_sampling_ratio_min: Annotated[FactorOrZero | None, _WITH_CORRECTION] = None
    """Lower bound of the correction weight, required by icepop and seq-mask-tis; null with tis: 0."""
    positive_example_nll_weight: FactorOrZero = 0.0
    """VAPO: weight of the negative log-likelihood of answers with a positive reward. It is summed over their tokens and
    divided by the same number as the rest of the loss. 0 disables it."""

    @property
    def corrects_staleness(self) -> bool:
        """Return True if the loss corrects stale tokens with log-probabilities of the policy before the update.

        Importance weights account for the difference from the sampling policy. A forced ratio of 1 ignores it on
        purpose.
        """
        return self.use_importance_sampling_correction or self.force_on_policy_ratio
