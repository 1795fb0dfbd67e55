"""Keys of `loss_fn` for the policy-gradient family (GRPO, DAPO, GSPO, CISPO, REINFORCE++).

Read by the losses and advantage rooms. Law: each key only selects a formula; sizes live elsewhere.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from nemo_rl.config.section import Section


class ClippedPGLossConfig(Section):
    """How the clipped policy-gradient loss is formed."""

    later: ClassVar[dict[str, str]] = {
        "positive_example_nll_weight": "an extra likelihood loss on correct samples (VAPO)",
    }

    reference_policy_kl_penalty: NonNegativeFloat = Field(
        default=0.01, description="Weight of the KL term against the reference policy; 0 switches it off."
    )
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="Estimator of the per-token KL divergence."
    )
    kl_input_clamp_value: PositiveFloat | None = Field(
        default=20.0, description="Bound in nats on the log ratio before the KL estimator; null: none."
    )
    kl_output_clamp_value: PositiveFloat | None = Field(
        default=10.0, description="Bound in nats on the KL estimate of a token; null: none."
    )
    use_on_policy_kl_approximation: bool = Field(
        default=False, description="Weight the KL term by the ratio of current to generation probabilities."
    )
    use_kl_in_reward: bool = Field(
        default=False, description="Subtract the KL term from the reward instead of adding it to the loss."
    )
    ratio_clip_min: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.2, description="Lower clip epsilon: the ratio is clipped below 1 - ratio_clip_min."
    )
    ratio_clip_max: NonNegativeFloat = Field(
        default=0.2, description="Upper clip epsilon: the ratio is clipped above 1 + ratio_clip_max."
    )
    ratio_clip_c: Annotated[float, Field(gt=1)] | None = Field(
        default=None, description="Dual-clip bound for negative advantages, greater than 1; null: off."
    )
    disable_ppo_ratio: bool = Field(
        default=False, description="Use the REINFORCE gradient, without probability ratio and clipping."
    )
    force_on_policy_ratio: bool = Field(
        default=False, description="Take the ratio as exactly 1; needs one optimizer update per rollout batch."
    )
    use_cispo: bool = Field(
        default=False, description="CISPO: clip the importance weight and stop its gradient, keep all tokens."
    )
    sequence_level_importance_ratios: bool = Field(
        default=False, description="GSPO: one ratio per sequence, the geometric mean over its tokens."
    )
    token_level_loss: bool = Field(
        default=True, description="Average the loss over all tokens (true) or over sequences first (false)."
    )
    use_importance_sampling_correction: bool = Field(
        default=False, description="Weight tokens by training over generation probability to undo mismatch."
    )
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = Field(
        default=None,
        description="What happens to correction weights out of bounds: tis cuts them at the upper "
        "bound, icepop zeroes the token, seq-mask-tis zeroes the whole sequence; null means tis "
        "when a bound is given.",
    )
    truncated_importance_sampling_ratio: PositiveFloat | None = Field(
        default=None, description="Upper bound of the correction weight; null: no bound."
    )
    truncated_importance_sampling_ratio_min: NonNegativeFloat | None = Field(
        default=None, description="Lower bound of the correction weight, for icepop and seq-mask-tis."
    )
