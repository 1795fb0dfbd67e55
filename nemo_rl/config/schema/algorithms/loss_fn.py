"""Keys of `loss_fn` for the policy-gradient family (GRPO, PPO, DAPO, GSPO, CISPO, REINFORCE++).

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
    """clipped_pg, the loss that the keys below describe, or the dotted path of a class. For a class, these keys only
    decide what its batches hold: reference_policy_logprobs if reference_policy_kl_penalty is not 0."""
    reference_policy_kl_penalty: Number = 0.01
    """Weight of the KL term against the reference policy; 0 switches it off, a negative weight drives the policy away
    from the reference. With top_k or top_p both distributions are filtered (in NeMo RL neither), so that the KL is that
    of the distribution that is sampled from."""
    reference_policy_kl_type: Annotated[Literal["k1", "k2", "k3"], _WITH_KL] = "k3"
    """Estimator of the per-token KL divergence; in expectation the gradients of k1 and k3 equal that of the divergence,
    the gradient of k2 is about twice as large."""
    kl_input_clamp_value: Annotated[FactorOrZero | None, _WITH_KL] = 20.0
    """Bound in nats on the log ratio before the KL estimator; beyond it a token gets no gradient from the KL term.
    null: none."""
    kl_output_clamp_value: Annotated[FactorOrZero | None, _WITH_KL] = 10.0
    """Bound in nats on a token's weighted KL estimate; beyond it the token gets no gradient from the KL term. null:
    none."""
    use_on_policy_kl_approximation: Annotated[bool, _WITH_KL] = False
    """Weight the KL term, before its output clamp, by the ratio of current to generation probabilities."""
    sequence_level_kl_weight: Annotated[bool, _WITH_KL] = False
    """Weight the KL term by the ratio's geometric mean over the sequence, not by each token's ratio. With
    use_on_policy_kl_approximation the mean is the weight; without it the weight is 1, with the mean's gradient."""
    use_kl_in_reward: Annotated[bool, _WITH_KL] = False
    """Subtract the KL term from the reward instead of adding it to the loss."""
    ratio_clip_min: FactorOrZero = 0.2
    """Lower clip epsilon: the ratio is clipped below 1 - ratio_clip_min; 1 or more: never."""
    ratio_clip_max: Annotated[float, Field(gt=-1, le=1e9)] = 0.2
    """Upper clip epsilon: the ratio is clipped above 1 + ratio_clip_max; below 0 only with use_cispo."""
    ratio_clip_c: Annotated[Annotated[float, Field(gt=1, le=1e9)] | None, _WITH_RATIO] = None
    """Dual-clip bound for negative advantages, greater than 1; null: off."""
    disable_ppo_ratio: bool = False
    """Use the REINFORCE loss -A log p, without ratio and clipping: ratio_clip_c has no effect, and
    sequence_level_importance_ratios changes only the correction weights. With force_on_policy_ratio the value of the
    loss is -A, and the gradient is the same."""
    force_on_policy_ratio: bool = False
    """Take the ratio as exactly 1; needs one optimizer update per rollout batch."""
    use_cispo: bool = False
    """CISPO: clip the importance weight and stop its gradient, keep all tokens; needs token_level_loss."""
    sequence_level_importance_ratios: bool = False
    """GSPO: one ratio per sequence, the geometric mean over its tokens, and one correction weight per sequence, the
    product over its tokens; needs token_level_loss=false."""
    token_level_loss: bool = True
    """Average the loss over all tokens (true) or over sequences first (false)."""
    constant_sample_length: Factor | None = None
    """Dr.GRPO: divide the sum over tokens by this many tokens per sample that counts, for example max_new_tokens,
    instead of by the number of tokens that count; null: off."""
    use_importance_sampling_correction: bool = False
    """Weight each token by its probability in training over that in generation, to correct their mismatch."""
    truncated_importance_sampling_type: Annotated[Literal["tis", "icepop", "seq-mask-tis"] | None, _WITH_CORRECTION] = (
        None
    )
    """Treatment of correction weights out of bounds: tis clamps them, icepop zeroes the token, seq-mask-tis zeroes the
    whole sequence; null: there are no bounds."""
    truncated_importance_sampling_ratio: Annotated[Factor | None, _WITH_CORRECTION] = None
    """Upper bound of the correction weight; every type needs it."""
    truncated_importance_sampling_ratio_min: Annotated[FactorOrZero | None, _WITH_CORRECTION] = None
    """Lower bound of the correction weight, needed by icepop and seq-mask-tis; null with tis: 0."""
    positive_example_nll_weight: FactorOrZero = 0.0
    """VAPO: weight of the negative log-likelihood of answers with a positive reward, summed over their tokens and
    divided by the same number as the rest of the loss; 0 switches it off."""

    @property
    def corrects_staleness(self) -> bool:
        """True if the loss handles tokens of older weights with log-probabilities of the policy before the update.

        Importance weights account for the difference to the policy that sampled; a forced ratio of 1 ignores it on
        purpose.
        """
        return self.use_importance_sampling_correction or self.force_on_policy_ratio
