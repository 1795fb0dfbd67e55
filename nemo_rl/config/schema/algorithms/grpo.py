"""Keys of `grpo`: steps of the training loop, and the computation of advantages from rewards.

Lengths and batch sizes of the model are in `policy`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl.config.base.part_names import PartName
from nemo_rl.config.base.section import Section, derived
from nemo_rl.config.schema.algorithms.overlap import AsyncGRPOConfig
from nemo_rl.config.schema.algorithms.rollout_training import RolloutTrainingConfig
from nemo_rl.config.schema.named_part import NamedPartConfig

_BUILT = ("grpo", "dr_grpo", "rloo", "gdpo", "reinforce_plus_plus")
_PPO = "PPO with a value model (grpo and rloo need none)"

AdvantageEstimatorName = Annotated[
    str,
    PartName(
        _BUILT, {"opd": "Multi-teacher on-policy distillation", **dict.fromkeys(("gae", "raw", "raw_reward"), _PPO)}
    ),
]


class AdvantageEstimatorConfig(NamedPartConfig):
    """The formula that turns a group's rewards into advantages; its other keys are for built-in names."""

    name: AdvantageEstimatorName = "grpo"
    """Advantage formula; dr_grpo and rloo set the two switches below themselves; or the dotted path of a class."""
    normalize_rewards: bool = derived("${..normalize_rewards}")
    """Divide by the sample standard deviation (n - 1) of the rewards that make the baseline; gdpo always whitens its
    sum over the batch."""
    std_level: Literal["group", "batch"] = "group"
    """With normalize_rewards: use the deviation of the prompt's rewards (group), or of all rewards of the step
    (batch)."""
    use_leave_one_out_baseline: bool = derived("${..use_leave_one_out_baseline}")
    """Leave the sample's own reward out of its baseline."""
    minus_baseline: bool = True
    """REINFORCE++: subtract the group's mean reward before whitening the batch."""
    kl_to_go: bool = False
    """REINFORCE++ with use_kl_in_reward: subtract the KL of this and all later tokens, as its paper does; false: the KL
    of this token only, as NeMo RL does."""
    credit: Literal["episode", "turn_returns", "turn_rewards"] = "episode"
    """Credit of the tokens of a turn: the reward of the whole episode; the discounted return from this
    turn on, compared with the group's returns at the same turn; or the turn's reward, compared with the group's rewards
    at the same turn, plus the discounted results of later turns. Per turn with grpo, dr_grpo and rloo only."""
    turn_discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    """With credit per turn: factor on a reward for each turn between it and the turn that is credited."""
    reward_weights: list[float] | None = None
    """GDPO: weight of each reward component, in order; null: all 1."""


class RewardScalingConfig(Section):
    """A linear map of rewards, and with gdpo of each component, from a source range to a target range."""

    enabled: bool = False
    """Map rewards linearly from source to target range."""
    source_min: float = 0.0
    """Reward that becomes target_min; lower ones are cut."""
    source_max: float = 1.0
    """Reward that becomes target_max; higher ones are cut."""
    target_min: float = 0.0
    """Low end of the new range."""
    target_max: float = 1.0
    """High end of the new range."""


class RewardShapingConfig(Section):
    """DAPO's penalties on over-long answers."""

    enabled: bool = False
    """Apply the length penalties below to each total reward; gdpo's advantages come from the components and do not
    change."""
    max_response_length: PositiveInt | None = derived("${policy.max_total_sequence_length}")
    """Answer length in tokens at which the full penalty applies; all turns count (in NeMo RL only the first), since
    all of them are trained on."""
    overlong_buffer_length: NonNegativeInt | None = 128
    """Tokens before max_response_length over which the penalty grows linearly; a value above max_response_length gives
    even the shortest answer a part of the penalty."""
    overlong_buffer_penalty: NonNegativeFloat | None = 1.0
    """Penalty at max_response_length, subtracted from the reward."""
    limit_overlong_penalty: bool = False
    """Keep the penalty of longer answers at overlong_buffer_penalty, as DAPO's paper does; false: it continues to grow
    at the same rate, as in NeMo RL. Without a buffer it is always limited."""
    stop_properly_penalty_coef: Annotated[float, Field(ge=0, le=1)] | None = None
    """Factor on the reward of cut-off answers, used instead of the ramp; null: off."""


class GRPOConfig(RolloutTrainingConfig):
    """Group relative policy optimisation: steps, groups, validation and processing of rewards."""

    ignored: ClassVar[dict[str, str]] = {
        "calculate_advantages_on_gpu": "advantages are a few numbers per answer and computed in the driver",
        "debug_payload_metrics": "sizes of messages are not reported",
        "deduplicate_multimodal_data": "there are no images, sounds or videos",
        **dict.fromkeys(
            (
                *("invalid_tool_call_strategy", "num_val_generations_per_prompt", "penalize_invalid_tool_call"),
                *("penalize_malformed_thinking", "zero_variance_prompt_filtering"),
            ),
            "NeMo RL does not read it either",
        ),
    }
    idle: ClassVar[dict[str, str]] = {
        "skip_reference_policy_logprobs_calculation": "the reference policy runs only where a KL penalty needs it",
    }

    @classmethod
    def without_effect(cls, values: Mapping[str, Any]) -> Mapping[str, str]:
        """Report batch_multiplier where dynamic sampling is off."""
        idle = not values.get("use_dynamic_sampling") and values.get("batch_multiplier", 1) != 1
        told = {"batch_multiplier": "use_dynamic_sampling is false"} if idle else {}
        return {**super().without_effect(values), **told}

    normalize_rewards: bool = True
    """Divide advantages by the sample standard deviation of the prompt's rewards."""
    use_leave_one_out_baseline: bool = True
    """The baseline of a sample leaves out its own reward."""
    adv_estimator: AdvantageEstimatorConfig = Field(default_factory=AdvantageEstimatorConfig)
    """The advantage formula."""
    advantage_clip_low: float | None = None
    """Lower bound of the final advantage; null: none."""
    advantage_clip_high: float | None = None
    """Upper bound of the final advantage; null: none."""
    invalid_tool_call_advantage: float | None = None
    """Advantage of the tokens of a turn whose tool call cannot be made (not readable, unknown tool, wrong arguments),
    instead of the computed one; null: off."""
    malformed_thinking_advantage: float | None = None
    """Advantage of thinking tags that are out of place (see reward_penalties.penalize_malformed_think_tag), instead of
    the computed one; where a tag is missing at the end of a turn, of the tag that was not closed, or of the last token
    if the prompt has opened the thinking; null: off."""
    reward_scaling: RewardScalingConfig = Field(default_factory=RewardScalingConfig)
    """Linear map of rewards."""
    reward_shaping: RewardShapingConfig = Field(default_factory=RewardShapingConfig)
    """Penalties on over-long answers."""
    use_dynamic_sampling: bool = False
    """DAPO: drop prompts whose scaled rewards are all equal and draw others instead; this also holds with the
    leave-one-out baseline, where NeMo RL drops single answers whose peers are all equal."""
    batch_multiplier: Annotated[float, Field(ge=1)] = 1.0
    """With dynamic sampling: each round draws num_prompts_per_step times this many prompts; without it no effect."""
    dynamic_sampling_max_gen_batches: PositiveInt = 10
    """With dynamic sampling: rounds of one step after which the run saves and ends."""
    seq_logprob_error_threshold: PositiveFloat | None = None
    """Mask a sequence whose mean ratio of training to generation probability exceeds this (its reward still counts in
    the baseline of the other answers); null: never."""
    skip_reference_policy_logprobs_calculation: bool = False
    """Assert that the reference policy never runs: true is refused unless loss_fn.reference_policy_kl_penalty=0, in
    which case it is not needed."""
    async_grpo: AsyncGRPOConfig | None = Field(default_factory=AsyncGRPOConfig)
    """NeMo RL's section for overlap; fills in overlap where enabled."""
