"""Define the common keys of algorithms that train on the policy's own answers: GRPO, PPO and distillation.

GRPO and PPO, which learn from rewards, have more common keys.
"""

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from nemo_rl.config.base.availability import OnlyWith
from nemo_rl.config.base.section import Section, Seed, derived
from nemo_rl.config.base.value_types import (
    Amount,
    AmountOrMinusOne,
    Count,
    CountOrZero,
    Factor,
    FactorOrZero,
    Number,
    Tokens,
)
from nemo_rl.config.schema.algorithms.overlap import OverlapConfig
from nemo_rl.config.schema.named_part import RolloutSourceConfig

NO_LIMIT = 10**9
"""Number of passes over the data that means no limit."""


def _passes(number: int) -> int:
    if number == 0:
        raise PydanticCustomError("epochs", "give a number of passes from 1 on, or -1 for no limit")
    return NO_LIMIT if number == -1 else number


Epochs = Annotated[int, Field(ge=-1, le=10**12), AfterValidator(_passes)]
"""Number of passes over the training data; -1: no limit."""


class RolloutTrainingConfig(Section):
    """Steps, prompts and validation of a run that samples answers."""

    num_prompts_per_step: Count = 32
    """Number of prompts drawn from the data for each training step."""
    num_generations_per_prompt: Count = 16
    """Number of answers sampled for each prompt (the group size)."""
    max_num_steps: Amount = 1_000_000
    """Training stops after this many steps."""
    max_num_epochs: Epochs = 1
    """Training stops after this many passes over the training data; -1: no limit. With data.train.<i>.weight one pass
    has as many prompts as all data sets together have rows."""
    max_rollout_turns: Count = 1
    """Largest number of turns of model and environment in one rollout."""
    max_episode_tokens: Tokens | None = None
    """Largest number of tokens that the model writes in all turns of a rollout; null: only
    policy.generation.max_new_tokens limits each turn, and policy.max_total_sequence_length the whole rollout."""
    max_idle_steps: Count = 5
    """The run ends with an error after this number of consecutive steps without an update: no sample counts in the
    loss, or the gradients are not finite."""
    seed: Seed = 42
    """Seed of data order, initialisation and sampling."""
    overlong_filtering: bool = False
    """Exclude answers that hit the length limit from the loss. Their rewards still count in the baseline of the other
    answers."""
    val_period: AmountOrMinusOne = 10
    """Number of steps between two validations; 0 or -1: only at start or end."""
    val_start_at: AmountOrMinusOne = -1
    """First step at which periodic validation may run; -1: no delay."""
    val_at_start: bool = False
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step."""
    val_batch_size: Count | None = 256
    """Number of prompts in one validation batch; null: all in one batch."""
    max_val_samples: Amount | None = 256
    """Prompts validated in total, equally many of each data set if it has so many; null: all of the validation data."""
    val_num_generations_per_prompt: Count = 1
    """Answers per validation prompt; more than 1 adds the metric pass_k, the share of prompts with a reward above 0."""
    stop_at_validation_metric: str | None = None
    """Validation metric, e.g. accuracy, that can end the run early; null: no early end."""
    stop_at_validation_threshold: Number | None = None
    """Value of stop_at_validation_metric at which the run ends."""
    overlap: OverlapConfig = Field(default_factory=OverlapConfig)
    """Overlap of sampling and training."""
    rollout_source: RolloutSourceConfig = Field(default_factory=RolloutSourceConfig)
    """Source of the groups of answers of a step."""


class RewardScalingConfig(Section):
    """A linear map of rewards (with gdpo, of each component) from a source range to a target range."""

    enabled: bool = False
    """Map rewards linearly from source to target range."""
    source_min: Number = 0.0
    """Reward that becomes target_min; lower rewards become target_min too."""
    source_max: Number = 1.0
    """Reward that becomes target_max; higher rewards become target_max too."""
    target_min: Number = 0.0
    """Lower end of the target range."""
    target_max: Number = 1.0
    """Upper end of the target range."""


class RewardShapingConfig(Section):
    """DAPO's penalties on overlong answers."""

    enabled: bool = False
    """Apply the length penalties below to each total reward. The advantages of gdpo are computed from components and do
    not change."""
    max_response_length: Count | None = derived("${policy.max_total_sequence_length}")
    """Answer length in tokens at which the full penalty applies. All turns count (in NeMo RL only the first), because
    all of them are trained."""
    overlong_buffer_length: CountOrZero | None = 128
    """Number of tokens before max_response_length over which the penalty grows linearly. If it is above
    max_response_length, even the shortest answer gets a part of the penalty."""
    overlong_buffer_penalty: FactorOrZero | None = 1.0
    """Penalty at max_response_length, subtracted from the reward."""
    limit_overlong_penalty: bool = False
    """Limit the penalty of longer answers to overlong_buffer_penalty, as in DAPO's paper; false: the penalty continues
    to grow at the same rate, as in NeMo RL. Without a buffer, the penalty is always limited."""
    stop_properly_penalty_coef: Annotated[float, Field(ge=0, le=1)] | None = None
    """Factor of the reward of truncated answers, used instead of the overlong penalty; null: off."""


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
    """DAPO: drop prompts whose scaled rewards are all equal, and draw others instead. This also applies to the
    leave-one-out baseline, for which NeMo RL drops single answers whose peers are all equal."""
    batch_multiplier: Annotated[Annotated[float, Field(ge=1, le=1000)], OnlyWith("use_dynamic_sampling")] = 1.0
    """With dynamic sampling: each round draws num_prompts_per_step times this many prompts; without it no effect."""
    dynamic_sampling_max_gen_batches: Annotated[Count, OnlyWith("use_dynamic_sampling")] = 10
    """With dynamic sampling: largest number of rounds of one step. If they do not suffice, the run saves and ends."""
    seq_logprob_error_threshold: Factor | None = None
    """Mask a sequence whose mean ratio of training to generation probability exceeds this value. Its reward still
    counts in the baseline of the other answers. null: no mask."""
    skip_reference_policy_logprobs_calculation: bool = False
    """Require that the reference policy never runs: true is refused unless loss_fn.reference_policy_kl_penalty=0."""
