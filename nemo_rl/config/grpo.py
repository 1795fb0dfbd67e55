"""Keys of `grpo`: the cadence of the training loop and how rewards become advantages.

Read by the algorithms room. Law: lengths and batch sizes of the model live in `policy`.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl.config.section import Section
from nemo_rl.config.structure import Only

AdvantageEstimatorName = Annotated[
    Literal["grpo", "dr_grpo", "rloo", "gdpo", "reinforce_plus_plus", "opd"],
    Only(
        ("grpo", "dr_grpo", "rloo", "gdpo", "reinforce_plus_plus"),
        "Multi-teacher on-policy distillation",
    ),
]


class AdvantageEstimatorConfig(Section):
    """How a group's rewards become advantages."""

    name: AdvantageEstimatorName = Field(
        "grpo", description="Advantage formula; dr_grpo and rloo set the two switches below themselves."
    )
    normalize_rewards: bool = Field(
        "${..normalize_rewards}",  # type: ignore[assignment]
        description="Divide by the standard deviation of the group's rewards.",
    )
    use_leave_one_out_baseline: bool = Field(
        "${..use_leave_one_out_baseline}",  # type: ignore[assignment]
        description="Leave the sample's own reward out of its baseline.",
    )
    minus_baseline: bool = Field(
        True, description="REINFORCE++: subtract the group's mean reward before whitening the batch."
    )
    reward_weights: list[float] | None = Field(
        None, description="GDPO: weight of each reward component, in order; null: all 1."
    )


class RewardScalingConfig(Section):
    """A linear map of rewards from a source range to a target range."""

    enabled: bool = Field(False, description="Map rewards linearly from source to target range.")
    source_min: float = Field(0.0, description="Reward that becomes target_min; lower ones are cut.")
    source_max: float = Field(1.0, description="Reward that becomes target_max; higher ones are cut.")
    target_min: float = Field(0.0, description="Low end of the new range.")
    target_max: float = Field(1.0, description="High end of the new range.")


class RewardShapingConfig(Section):
    """DAPO's penalties on over-long answers."""

    enabled: bool = Field(False, description="Apply the length penalties below to each reward.")
    max_response_length: PositiveInt | None = Field(
        "${policy.max_total_sequence_length}",  # type: ignore[assignment]
        description="Answer length in tokens at which the penalty is full.",
    )
    overlong_buffer_length: NonNegativeInt | None = Field(
        128, description="Tokens before max_response_length over which the penalty grows linearly."
    )
    overlong_buffer_penalty: NonNegativeFloat | None = Field(
        1.0, description="Full penalty, subtracted from the reward."
    )
    stop_properly_penalty_coef: NonNegativeFloat | None = Field(
        None,
        description="Factor on the reward of cut-off answers, used instead of the ramp; null: off.",
    )


class GRPOConfig(Section):
    """Group relative policy optimisation: steps, groups, validation and reward treatment."""

    later: ClassVar[dict[str, str]] = {
        "async_grpo": "asynchronous training",
        "calculate_advantages_on_gpu": "advantage computation on the GPU",
        "debug_payload_metrics": "payload size metrics",
        "deduplicate_multimodal_data": "multimodal data",
        "invalid_tool_call_advantage": "an advantage for invalid tool calls",
        "malformed_thinking_advantage": "an advantage for malformed thinking tags",
    }

    num_prompts_per_step: PositiveInt = Field(32, description="Prompts drawn from the data for each training step.")
    num_generations_per_prompt: PositiveInt = Field(16, description="Answers sampled for each prompt, the group size.")
    max_num_steps: PositiveInt = Field(1_000_000, description="Training stops after this many steps.")
    max_num_epochs: PositiveInt = Field(1, description="Training stops after this many passes over the training data.")
    max_rollout_turns: PositiveInt = Field(1, description="Most turns of model and environment in one rollout.")
    seed: NonNegativeInt = Field(42, description="Seed of data order, initialisation and sampling.")
    normalize_rewards: bool = Field(
        True, description="Divide advantages by the standard deviation of the prompt's rewards."
    )
    use_leave_one_out_baseline: bool = Field(True, description="The baseline of a sample leaves out its own reward.")
    adv_estimator: AdvantageEstimatorConfig = Field(
        default_factory=AdvantageEstimatorConfig, description="The advantage formula."
    )
    advantage_clip_low: float | None = Field(None, description="Lower bound of the final advantage; null: none.")
    advantage_clip_high: float | None = Field(None, description="Upper bound of the final advantage; null: none.")
    overlong_filtering: bool = Field(False, description="Give answers that hit the length limit no weight in the loss.")
    reward_scaling: RewardScalingConfig = Field(
        default_factory=RewardScalingConfig, description="Linear map of rewards."
    )
    reward_shaping: RewardShapingConfig = Field(
        default_factory=RewardShapingConfig, description="Penalties on over-long answers."
    )
    use_dynamic_sampling: bool = Field(
        False, description="DAPO: drop prompts whose rewards are all equal and draw others instead."
    )
    batch_multiplier: Annotated[float, Field(ge=1)] = Field(
        1.0, description="With dynamic sampling: prompts drawn per round over num_prompts_per_step."
    )
    dynamic_sampling_max_gen_batches: PositiveInt = Field(
        10, description="With dynamic sampling: rounds of one step before the run stops with an error."
    )
    seq_logprob_error_threshold: PositiveFloat | None = Field(
        None,
        description="Mask a sequence whose mean ratio of training to generation probability exceeds this; null: never.",
    )
    skip_reference_policy_logprobs_calculation: bool = Field(
        False, description="Never run the reference policy; needs loss_fn.reference_policy_kl_penalty=0."
    )
    val_period: NonNegativeInt = Field(10, description="Validate every this many steps; 0: only at start or end.")
    val_start_at: int = Field(-1, ge=-1, description="First step at which periodic validation may run; -1: no delay.")
    val_at_start: bool = Field(False, description="Validate before the first step.")
    val_at_end: bool = Field(False, description="Validate after the last step.")
    val_batch_size: PositiveInt | None = Field(256, description="Prompts in one validation batch; null: all at once.")
    max_val_samples: PositiveInt | None = Field(
        256, description="Prompts validated in total; null: all of the validation data."
    )
    val_num_generations_per_prompt: PositiveInt = Field(
        1, description="Answers per validation prompt; more than 1 adds the metric pass_k."
    )
    stop_at_validation_metric: str | None = Field(
        None, description="Validation metric, e.g. accuracy, that ends the run early; null: none."
    )
    stop_at_validation_threshold: float | None = Field(
        None, description="Value of stop_at_validation_metric at which the run ends."
    )
