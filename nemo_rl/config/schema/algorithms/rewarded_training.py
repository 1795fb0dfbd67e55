"""Keys shared by the algorithms that learn from rewards of answers: GRPO and PPO.

They cover the processing of rewards before they become advantages, and which samples are trained on.
"""

from typing import Annotated, ClassVar

from pydantic import Field

from nemo_rl.config.base.availability import OnlyWith
from nemo_rl.config.base.numbers import Count, CountOrZero, Factor, FactorOrZero, Number
from nemo_rl.config.base.section import Section, derived
from nemo_rl.config.schema.algorithms.rollout_training import RolloutTrainingConfig


class RewardScalingConfig(Section):
    """A linear map of rewards, and with gdpo of each component, from a source range to a target range."""

    enabled: bool = False
    """Map rewards linearly from source to target range."""
    source_min: Number = 0.0
    """Reward that becomes target_min; lower ones are cut."""
    source_max: Number = 1.0
    """Reward that becomes target_max; higher ones are cut."""
    target_min: Number = 0.0
    """Low end of the new range."""
    target_max: Number = 1.0
    """High end of the new range."""


class RewardShapingConfig(Section):
    """DAPO's penalties on over-long answers."""

    enabled: bool = False
    """Apply the length penalties below to each total reward; gdpo's advantages come from the components and do not
    change."""
    max_response_length: Count | None = derived("${policy.max_total_sequence_length}")
    """Answer length in tokens at which the full penalty applies; all turns count (in NeMo RL only the first), since
    all of them are trained on."""
    overlong_buffer_length: CountOrZero | None = 128
    """Tokens before max_response_length over which the penalty grows linearly; a value above max_response_length gives
    even the shortest answer a part of the penalty."""
    overlong_buffer_penalty: FactorOrZero | None = 1.0
    """Penalty at max_response_length, subtracted from the reward."""
    limit_overlong_penalty: bool = False
    """Keep the penalty of longer answers at overlong_buffer_penalty, as DAPO's paper does; false: it continues to grow
    at the same rate, as in NeMo RL. Without a buffer it is always limited."""
    stop_properly_penalty_coef: Annotated[float, Field(ge=0, le=1)] | None = None
    """Factor on the reward of cut-off answers, used instead of the ramp; null: off."""


class RewardedTrainingConfig(RolloutTrainingConfig):
    """Steps, prompts, validation and processing of rewards of a run that learns from rewards."""

    ignored: ClassVar[dict[str, str]] = {
        "calculate_advantages_on_gpu": "advantages are a few numbers per answer and computed in the driver",
    }
    idle: ClassVar[dict[str, str]] = {
        "skip_reference_policy_logprobs_calculation": "the reference policy runs only where a KL penalty needs it",
    }

    reward_scaling: RewardScalingConfig = Field(default_factory=RewardScalingConfig)
    """Linear map of rewards."""
    reward_shaping: RewardShapingConfig = Field(default_factory=RewardShapingConfig)
    """Penalties on over-long answers."""
    use_dynamic_sampling: bool = False
    """DAPO: drop prompts whose scaled rewards are all equal and draw others instead; this also holds with the
    leave-one-out baseline, where NeMo RL drops single answers whose peers are all equal."""
    batch_multiplier: Annotated[Annotated[float, Field(ge=1, le=1000)], OnlyWith("use_dynamic_sampling")] = 1.0
    """With dynamic sampling: each round draws num_prompts_per_step times this many prompts; without it no effect."""
    dynamic_sampling_max_gen_batches: Annotated[Count, OnlyWith("use_dynamic_sampling")] = 10
    """With dynamic sampling: rounds of one step after which the run saves and ends."""
    seq_logprob_error_threshold: Factor | None = None
    """Mask a sequence whose mean ratio of training to generation probability exceeds this (its reward still counts in
    the baseline of the other answers); null: never."""
    skip_reference_policy_logprobs_calculation: bool = False
    """Assert that the reference policy never runs: true is refused unless loss_fn.reference_policy_kl_penalty=0, in
    which case it is not needed."""
