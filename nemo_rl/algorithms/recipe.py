"""Define the recipe of a run: the choices of its algorithm that need no worker.

Each algorithm's `recipe` makes the choices from the configuration and the caller's parts, for `start.start_run`.
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
    """The choices of an algorithm that samples."""

    needs_reward: bool = True
    """Whether samples without a reward are excluded from the loss."""
    environments: Mapping[str, Any] = field(default_factory=dict)
    """User-supplied environments by task name, used instead of those in `env`; see `rollout.environments`."""
    review: ReviewSettings = field(default_factory=ReviewSettings)
    """Settings of the review of finished samples, such as reward penalties."""


@dataclass(frozen=True)
class Recipe:
    """The choices of an algorithm, complete before anything starts."""

    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of all models and of the data."""
    data: RunData
    """Prompts, or rows to train on."""
    loss_fn: AnyLossFunction
    """Loss that the policy is trained on."""
    roles: Mapping[str, Role]
    """Models by name; "policy" is trained on `loss_fn` and sampled from."""
    stages: Callable[[Mapping[str, Any]], list[Stage]] = no_stages
    """Function that builds the stages of a step from the started models, or from objects with the same methods."""
    trainer: Callable[[Mapping[str, Any], Session], Trainer] | None = None
    """Function that builds the trainer from the started models and the session. If None, the policy is the trainer."""
    sampling: Sampling = field(default_factory=Sampling)
    """How answers are sampled, for runs that sample. The fields below are for runs on written rows."""
    collate: Collate = rl_collate_fn
    """Joins data into a batch."""
    rows_per_sample: int = 1
    """Number of rows of a batch that one sample takes: 2 for pairs."""
    validator: Callable[[LossValidator], Validate] | None = None
    """Replaces the validation that reports the loss."""
    validated_names: tuple[tuple[str, str], ...] | None = None
    """Metrics of the loss that a validation reports, see `LossValidator.names`."""
