"""Validation of supervised training, on one data set or several.

Invariant: a validation is weighted by what counts in it, so its loss does not depend on how it was cut into batches.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    """Computes a loss on held-out data.

    Attributes:
        batches: validation batches, iterated anew each time.
        stages: as in training.
        policy: the model.
        loss_fn: the loss.
        micro_batch_rows: rows of one pass of a rank; None forms passes as in training.
        names: name of a metric of the loss and the name it is reported under; None reports all.
    """

    batches: Iterable[Batch]
    stages: Sequence[Stage]
    policy: PolicyInterface
    loss_fn: LossFunction
    micro_batch_rows: int | None = None
    names: tuple[tuple[str, str], ...] | None = None

    def __call__(self, step: int) -> dict[str, float]:
        """Metrics of the whole validation; counts are summed, the rest is averaged by what counts."""
        batches = []
        for batch in self.batches:
            prepared = StepBatch(batch)
            for stage in self.stages:
                stage.apply(prepared)
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
    """Validates on several data sets, each for itself.

    Attributes:
        whole: validates on the rows without a name, None without any.
        named: validates on the rows of a name; its metric `m` is reported as `validation-<name>/m`.
    """

    whole: Validate | None
    named: Mapping[str, Validate]

    def __call__(self, step: int) -> dict[str, float]:
        """Metrics of all of them."""
        metrics = {} if self.whole is None else self.whole(step)
        for name, validate in self.named.items():
            metrics |= {f"validation-{name}/{metric}": value for metric, value in validate(step).items()}
        return metrics
