"""Supervised training: the one loop of SFT, DPO and reward models, and its validation.

One step: a batch, what the loss needs beside it, one optimizer update. `sft`, `dpo` and `rm` say what is different: the
batch, the preparation, the loss and the validation; `assemble_supervised` chooses them. Invariant: the loop holds no
option; a validation is weighted by what counts in it, so its loss does not depend on how it was cut into batches.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl.algorithms.runtime.session import Session
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.prompt_stream import PromptStream
from nemo_rl.losses.interfaces import LossFunction
from nemo_rl.models.policy.interfaces import PolicyInterface
from nemo_rl.models.policy.metrics import join_updates
from nemo_rl.utils.closing import close_all

type Batch = BatchedDataDict[Any]
type Prepare = Callable[[Batch], Batch]
"""Adds to a batch what the loss needs, for example reference log-probabilities."""

type Validate = Callable[[int], dict[str, float]]
"""Step -> metrics of a validation."""


@dataclass
class SupervisedRun:
    """Everything one run is made of; built by `assemble_supervised`.

    Attributes:
        session: steps, metrics, validation, checkpoints.
        batches: training batches, epoch after epoch; each is one optimizer update.
        prepare: what happens to a batch before it is trained on.
        policy: the model under training.
        loss_fn: what it is trained on.
        rows_per_sample: rows of a batch that one sample takes; 2 for pairs.
        closers: called in order when the run is over.
    """

    session: Session
    batches: PromptStream
    prepare: Prepare
    policy: PolicyInterface
    loss_fn: LossFunction
    rows_per_sample: int
    closers: Sequence[Callable[[], Any]] = ()

    def close(self) -> None:
        """Stop all workers and free what they hold."""
        close_all(self.closers)


def supervised_train(run: SupervisedRun) -> None:
    """Train until the steps, the data or the clock run out.

    Args:
        run: the parts of the run.
    """
    session = run.session
    with session:
        for step in session.steps():
            with session.phase("data_processing"):
                batch = run.batches.next_batch()
            with session.phase("policy_and_reference_logprobs"):
                batch = run.prepare(batch)
            with session.phase("policy_training"):
                result = run.policy.train(batch, run.loss_fn, gbs=batch.size)
            num_samples = batch.size // run.rows_per_sample
            session.record(result["metrics"], batch_counts(batch, num_samples))
            session.finish_step(step, num_prompts=num_samples)


def unchanged(batch: Batch) -> Batch:
    """The preparation of a loss that needs nothing beside the batch."""
    return batch


def batch_counts(batch: Batch, num_samples: int) -> dict[str, float]:
    """Sizes of a batch, as metrics."""
    return {"total_num_tokens": float(batch["input_lengths"].sum()), "num_samples": float(num_samples)}


@dataclass(frozen=True)
class LossValidator:
    """Computes a loss on held-out data.

    Attributes:
        batches: validation batches, iterated anew each time.
        prepare: as in training.
        policy: the model.
        loss_fn: the loss.
        micro_batch_rows: rows of one pass of a rank; None forms passes as in training.
        names: name of a metric of the loss and the name it is reported under; None reports all.
    """

    batches: Iterable[Batch]
    prepare: Prepare
    policy: PolicyInterface
    loss_fn: LossFunction
    micro_batch_rows: int | None = None
    names: tuple[tuple[str, str], ...] | None = None

    def __call__(self, step: int) -> dict[str, float]:
        """Metrics of the whole validation; counts are summed, the rest is averaged by what counts."""
        batches = []
        for batch in self.batches:
            prepared = self.prepare(batch)
            result = self.policy.train(
                prepared, self.loss_fn, eval_mode=True, gbs=prepared.size, mbs=self.micro_batch_rows
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
