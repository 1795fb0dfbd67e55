"""Define the keys of `grpo`: steps of the training loop, and the computation of advantages from rewards.

Lengths and batch sizes of the model are in `policy`.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nemo_rl.config.base.availability import OnlyWith
from nemo_rl.config.base.names import PartName
from nemo_rl.config.base.section import derived
from nemo_rl.config.base.value_types import Factor, Number
from nemo_rl.config.schema.algorithms.overlap import AsyncGRPOConfig
from nemo_rl.config.schema.algorithms.rollout_training import RewardedTrainingConfig
from nemo_rl.config.schema.named_part import NamedPartConfig

BUILT_IN_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "gdpo", "reinforce_plus_plus", "opd")
FROM_REWARDS = ("grpo", "dr_grpo", "rloo")
"""Built-in estimators that compute one advantage per sample from the rewards of its group. They can credit single
turns. They do not need tokens, so they work with rollout runners."""

AdvantageEstimatorName = Annotated[str, PartName(BUILT_IN_ESTIMATORS)]

_OF_TEACHERS = OnlyWith("name", ("opd",))
_PER_TURN = OnlyWith("credit", ("turn_returns", "turn_rewards", "step_rewards"))


class AdvantageEstimatorConfig(NamedPartConfig):
    """The formula for advantages from a group's rewards. Built-in names have further keys."""

    name: AdvantageEstimatorName = "grpo"
    """Formula, or the dotted path of a class. dr_grpo and rloo set normalize_rewards and use_leave_one_out_baseline."""
    normalize_rewards: bool = derived("${..normalize_rewards}")
    """Divide by the sample standard deviation (n - 1) of the rewards in the baseline. gdpo always whitens its sum over
    the batch."""
    std_level: Annotated[Literal["group", "batch"], OnlyWith("normalize_rewards")] = "group"
    """With normalize_rewards: the deviation of the prompt's rewards (group), or of all rewards of the step (batch)."""
    use_leave_one_out_baseline: bool = derived("${..use_leave_one_out_baseline}")
    """Exclude the sample's own reward from its baseline."""
    minus_baseline: Annotated[bool, OnlyWith("name", ("reinforce_plus_plus",))] = True
    """REINFORCE++: subtract the group's mean reward before whitening the batch."""
    kl_to_go: Annotated[bool, OnlyWith("name", ("reinforce_plus_plus",))] = False
    """REINFORCE++ with use_kl_in_reward: subtract the KL of this and all later tokens, as in its paper; false: only the
    KL of this token, as in NeMo RL."""
    credit: Literal["episode", "turn_returns", "turn_rewards", "step_rewards"] = "episode"
    """Credit of the tokens of a turn: the reward of the whole episode; the discounted return from this
    turn on, compared with the group's returns at the same turn; or the turn's reward, compared with the group's rewards
    at the same turn, plus the discounted results of later turns. step_rewards: credit of the tokens of a step, as with
    turn_rewards, compared with the rewards of all steps of the group. All but episode with grpo, dr_grpo and rloo
    only, step_rewards without rloo."""
    turn_discount: Annotated[Annotated[float, Field(ge=0, le=1)], _PER_TURN] = 1.0
    """With credit per turn or step: factor of a reward for each turn or step between it and the credited one."""
    reward_weights: Annotated[list[Number] | None, OnlyWith("name", ("gdpo",))] = None
    """GDPO: weight of each reward component, in order; null: all 1."""
    teacher_weight: Annotated[Factor, _OF_TEACHERS] = 1.0
    """opd: factor of the advantage of teachers, the teacher's minus the policy's log-probability of a token."""
    reward_advantages: Annotated[Literal["none", "grpo", "dr_grpo", "rloo"], _OF_TEACHERS] = "none"
    """opd: advantages of rewards to add. none: rewards are only reported."""


class GRPOConfig(RewardedTrainingConfig):
    """Group relative policy optimisation: steps, groups, validation and processing of rewards."""

    ignored: ClassVar[dict[str, str]] = {
        **RewardedTrainingConfig.ignored,
        "*best_at_k*": "NeMo RL does not read it either",
        "debug_payload_metrics": "sizes of messages are not reported",
        "deduplicate_multimodal_data": "files of images are never copied for each sample",
        **dict.fromkeys(
            (
                *("invalid_tool_call_strategy", "num_val_generations_per_prompt", "penalize_invalid_tool_call"),
                *("penalize_malformed_thinking", "zero_variance_prompt_filtering"),
            ),
            "NeMo RL does not read it either",
        ),
    }

    normalize_rewards: bool = True
    """Divide advantages by the sample standard deviation of the prompt's rewards."""
    use_leave_one_out_baseline: bool = True
    """Exclude a sample's own reward from its baseline."""
    adv_estimator: AdvantageEstimatorConfig = Field(default_factory=AdvantageEstimatorConfig)
    """The advantage formula."""
    advantage_clip_low: Number | None = None
    """Lower bound of the final advantage; null: no bound."""
    advantage_clip_high: Number | None = None
    """Upper bound of the final advantage; null: no bound."""
    invalid_tool_call_advantage: Number | None = None
    """Advantage of the tokens of a turn with an invalid tool call (not readable, unknown tool, wrong arguments),
    instead of the computed advantage; null: the computed one."""
    malformed_thinking_advantage: Number | None = None
    """Advantage of misplaced thinking tags (see reward_penalties.penalize_malformed_think_tag), instead of the computed
    advantage; null: the computed one. If a turn does not close its thinking, the opening tag gets it, or the last token
    of the turn if the prompt opened the thinking."""
    async_grpo: AsyncGRPOConfig | None = Field(default_factory=AsyncGRPOConfig)
    """NeMo RL's section for overlap. If it is enabled, it fills in overlap."""
