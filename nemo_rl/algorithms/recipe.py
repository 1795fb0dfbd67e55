"""Define the recipe of a run: the choices of its algorithm that need no worker.

Each algorithm's function `recipe` makes these choices. `start.start_run` starts a run from the result.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.runtime.run import Stage, Trainer
from nemo_rl.algorithms.runtime.session import Session
from nemo_rl.algorithms.supervised import LossValidator, Validate
from nemo_rl.config import Role
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.datasets.setup import RunData
from nemo_rl.data.streams.mixed_stream import Collate
from nemo_rl.experience.penalties import ReviewSettings
from nemo_rl.losses.loss_function import AnyLossFunction


def no_stages(models: Mapping[str, Any]) -> list[Stage]:
    """Return no stages, for an algorithm whose loss needs only the rows of the data."""
    return []


@dataclass(frozen=True)
class Sampling:
    """The choices of an algorithm that samples its training data."""

    needs_reward: bool = True
    """Whether samples without a reward are excluded from the loss."""
    environments: Mapping[str, Any] = field(default_factory=dict)
    """User-supplied environments by task name, used instead of those in the section `env`."""
    review: ReviewSettings = field(default_factory=ReviewSettings)
    """Settings of the review of finished samples, such as reward penalties."""


@dataclass(frozen=True)
class Recipe:
    """All choices of an algorithm, made before anything starts."""

    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of all models and of the data."""
    data: RunData
    """Prompts of a run that samples, or written rows of a run that does not."""
    loss_fn: AnyLossFunction
    """Loss of the policy."""
    roles: Mapping[str, Role]
    """Models by name. "policy" is the model that `loss_fn` trains and that answers are sampled from."""
    stages: Callable[[Mapping[str, Any]], list[Stage]] = no_stages
    """Function that builds the stages of a step. It gets the started models, or objects with the same methods."""
    trainer: Callable[[Mapping[str, Any], Session], Trainer] | None = None
    """Function that builds the trainer from the started models and the session. If None, the policy trains itself."""
    sampling: Sampling = field(default_factory=Sampling)
    """Settings of sampling. It is None for a run on written rows, for which the following fields are used."""
    collate: Collate = rl_collate_fn
    """Function that makes a batch from rows of the data."""
    rows_per_sample: int = 1
    """Number of batch rows per sample: 2 for pairs."""
    validator: Callable[[LossValidator], Validate] | None = None
    """Function that builds the validation. If it is None, validation reports the loss."""
    validated_names: tuple[tuple[str, str], ...] | None = None
    """Metrics of the loss that validation reports (`LossValidator.names`)."""
