"""Validates supervised training, on one data set or several.

Invariant: each batch is weighted by the samples or tokens that count in it, so the validation loss does not depend on
the batch size.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl.algorithms.runtime.device_sharing import MemorySharing
from nemo_rl.algorithms.runtime.run import Stage, StepBatch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.loss_function import LossFunction
from nemo_rl.models.policy.interfaces import PolicyInterface
from nemo_rl.models.policy.metrics import join_updates

type Batch = BatchedDataDict[Any]
type Validate = Callable[[int], dict[str, float]]
"""Step -> metrics of a validation."""


@dataclass(frozen=True)
class LossValidator:
    """Computes a loss on held-out data."""

    batches: Iterable[Batch]
    """Validation batches, iterated again for each validation."""
    stages: Sequence[Stage]
    """As in training."""
    policy: PolicyInterface
    memory: MemorySharing
    """Gives the stages and the policy their devices, where several models share them."""
    loss_fn: LossFunction
    micro_batch_rows: int | None = None
    """Rows of one pass of a rank; None forms passes as in training."""
    names: tuple[tuple[str, str], ...] | None = None
    """Names in the report by the names of the loss's metrics; None reports all."""

    def __call__(self, step: int) -> dict[str, float]:
        """Return metrics of the whole validation; counts are summed, other metrics are averaged by these counts."""
        batches = []
        for batch in self.batches:
            prepared = StepBatch(batch)
            for stage in self.stages:
                self.memory.hand_to(stage.roles)
                stage.apply(prepared)
            self.memory.hand_to(("policy",))
            result = self.policy.train(
                prepared.tensors, self.loss_fn, eval_mode=True, gbs=batch.size, mbs=self.micro_batch_rows
            )
            batches.append(result["metrics"])
        metrics = join_updates(batches, self.loss_fn)
        if self.names is None:
            return metrics
        return {reported: metrics[name] for name, reported in self.names}


@dataclass(frozen=True)
class SeparateValidations:
    """Validates on several data sets separately."""

    whole: Validate | None
    """Validates on the rows without a name; None if there are none."""
    named: Mapping[str, Validate]
    """Validates on the rows of a name; their metric `m` is reported as `validation-<name>/m`."""

    def __call__(self, step: int) -> dict[str, float]:
        """Return the metrics of all data sets."""
        metrics = {} if self.whole is None else self.whole(step)
        for name, validate in self.named.items():
            metrics |= {f"validation-{name}/{metric}": value for metric, value in validate(step).items()}
        return metrics
