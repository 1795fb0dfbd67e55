"""Keys shared by the algorithms that train on the policy's own answers: GRPO, PPO and distillation.

They cover steps, prompts and validation; keys of the loss are in the algorithm's own section.
"""

from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from nemo_rl.config.base.numbers import Amount, AmountOrMinusOne, Count, Number, Tokens
from nemo_rl.config.base.section import Section, Seed
from nemo_rl.config.schema.algorithms.overlap import OverlapConfig
from nemo_rl.config.schema.named_part import RolloutSourceConfig

NO_LIMIT = 10**9
"""The number of passes over the data that stands for no limit."""


def _passes(number: int) -> int:
    if number == 0:
        raise PydanticCustomError("epochs", "give a number of passes from 1 on, or -1 for no limit")
    return NO_LIMIT if number == -1 else number


Epochs = Annotated[int, Field(ge=-1, le=10**12), AfterValidator(_passes)]
"""Passes over the training data; -1: no limit."""


class RolloutTrainingConfig(Section):
    """Steps, prompts and validation of a run that samples answers."""

    num_prompts_per_step: Count = 32
    """Prompts drawn from the data for each training step."""
    num_generations_per_prompt: Count = 16
    """Answers sampled for each prompt, the group size."""
    max_num_steps: Amount = 1_000_000
    """Training stops after this many steps."""
    max_num_epochs: Epochs = 1
    """Training stops after this many passes over the training data; -1: no limit. With data.train.<i>.weight a pass
    is as many prompts as all data sets have rows."""
    max_rollout_turns: Count = 1
    """Most turns of model and environment in one rollout."""
    max_episode_tokens: Tokens | None = None
    """Most tokens that the model writes in all turns of one rollout; null: only policy.generation.max_new_tokens bounds
    each turn, and policy.max_total_sequence_length all of it."""
    max_idle_steps: Count = 5
    """The run ends with an error after this many steps in a row without an update: no sample counts in the loss, or the
    gradients are not finite."""
    seed: Seed = 42
    """Seed of data order, initialisation and sampling."""
    overlong_filtering: bool = False
    """Exclude answers that hit the length limit from the loss; their rewards still count in the baseline of the other
    answers."""
    val_period: AmountOrMinusOne = 10
    """Validate every this many steps; 0 or -1: only at start or end."""
    val_start_at: AmountOrMinusOne = -1
    """First step at which periodic validation may run; -1: no delay."""
    val_at_start: bool = False
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step."""
    val_batch_size: Count | None = 256
    """Prompts in one validation batch; null: all in one batch."""
    max_val_samples: Amount | None = 256
    """Prompts validated in total, equally many of each data set if it has so many; null: all of the validation data."""
    val_num_generations_per_prompt: Count = 1
    """Answers per validation prompt; more than 1 adds the metric pass_k, the share of prompts with a reward above 0."""
    stop_at_validation_metric: str | None = None
    """Validation metric, e.g. accuracy, that can end the run early; null: none."""
    stop_at_validation_threshold: Number | None = None
    """Value of stop_at_validation_metric at which the run ends."""
    overlap: OverlapConfig = Field(default_factory=OverlapConfig)
    """Whether sampling and training overlap."""
    rollout_source: RolloutSourceConfig = Field(default_factory=RolloutSourceConfig)
    """Where the groups of answers of a step come from."""
