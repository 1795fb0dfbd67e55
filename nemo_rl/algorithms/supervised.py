"""Draw the batches of a run on written rows, and validate it on held-out rows.

`sft`, `dpo`, `kto` and `rm` add their collation, loss and stages in their `recipe`. `start` connects the parts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.runtime.device_sharing import MemorySharing
from nemo_rl.algorithms.runtime.run import Phase, Stage, StepBatch
from nemo_rl.config import DPOConfig, PolicyConfig, SupervisedConfig
from nemo_rl.data.collate_fn import preference_collate_fn
from nemo_rl.data.datasets.processed_dataset import MixedDataset
from nemo_rl.data.loader import build_loader
from nemo_rl.data.streams.mixed_stream import Collate
from nemo_rl.data.streams.prompt_stream import GroupRewards, Prompts
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.loss_function import AnyLossFunction
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.workers.loss_calls import join_updates

type Batch = BatchedDataDict[Any]
type Validate = Callable[[int], dict[str, float]]
"""Function that validates after a step and returns metrics."""


@dataclass(frozen=True)
class LossValidator:
    """Validation that computes a loss on held-out data."""

    batches: Iterable[Batch]
    """Validation batches. Each validation iterates over them again."""
    stages: Sequence[Stage]
    """Stages that prepare a batch, as in training."""
    policy: Policy
    memory: MemorySharing
    """Object that gives the stages and the policy their devices if several models share them."""
    loss_fn: AnyLossFunction
    micro_batch_rows: int | None = None
    """Number of rows of a rank's microbatch. If None, microbatches are formed as in training."""
    names: tuple[tuple[str, str], ...] | None = None
    """Pairs of a metric's name in the loss and its reported name. If None, all metrics are reported."""

    def __call__(self, step: int) -> dict[str, float]:
        """Return metrics of the whole validation: sums of counts, and averages weighted by counts for other metrics."""
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
class SupervisedValidation:
    """Validation on several data sets, each with its own metrics."""

    whole: Validate | None
    """Function that validates on the rows without a data set name. None if there are none."""
    named: Mapping[str, Validate]
    """Validation functions by data set name. Their metric `m` is reported as `validation-<name>/m`."""
    memory: MemorySharing
    """Object that gives the policy its devices before the validation."""

    def __call__(self, step: int) -> dict[str, float]:
        """Return the metrics of all data sets."""
        self.memory.hand_to(("policy",))
        metrics = {} if self.whole is None else self.whole(step)
        for name, validate in self.named.items():
            metrics |= {f"validation-{name}/{metric}": value for metric, value in validate(step).items()}
        return metrics


@dataclass(frozen=True)
class WrittenBatches:
    """Source of batches of written rows, with one batch per optimizer update (`runtime.run.BatchSource`)."""

    rows: Prompts
    rows_per_sample: int
    """Number of batch rows per sample: 2 for pairs."""
    was_changed = False

    def next_batch(self, step: int, phase: Phase) -> StepBatch:
        """Return the next batch of rows, as `BatchSource.next_batch` does."""
        with phase("data_processing"):
            batch = self.rows.next_batch()
        tensors = batch.rows
        num_samples = tensors.size // self.rows_per_sample
        rewards: GroupRewards = dict.fromkeys(batch.positions, ())
        metrics = {"total_num_tokens": float(tensors["input_lengths"].sum()), "num_samples": float(num_samples)}
        return StepBatch(
            tensors,
            num_prompts=num_samples,
            metrics=metrics | self.rows.metrics(rewards),
            rows_per_update=tensors.size,
            prompts=batch.positions,
            rewards=rewards,
        )

    def trained(self, step: int, batch: StepBatch) -> None:
        """Acknowledge a trained batch, as `BatchSource.trained` does."""
        self.rows.acknowledge(batch.prompts)
        self.rows.finish_step(step, batch.rewards)


def validation_rows(policy: PolicyConfig, algorithm: SupervisedConfig, rows_per_sample: int) -> int | None:
    """Return the number of rows of a validation microbatch, or None if packing or dynamic batching is on."""
    if policy.sequence_packing.enabled or policy.dynamic_batching.enabled:
        return None
    return algorithm.val_micro_batch_size * rows_per_sample


def validation_batches(algorithm: SupervisedConfig, rows: MixedDataset, collate: Collate) -> Iterable[Batch]:
    """Return an iterable over the batches of held-out rows, which can be used several times."""
    batch_size = min(algorithm.val_global_batch_size, len(rows))
    return build_loader(
        rows,
        batch_size,
        shuffle=False,
        seed=algorithm.seed,
        drop_last=False,
        collate_fn=collate,
        max_rows=None if algorithm.val_batches < 0 else algorithm.val_batches * batch_size,
    )


def collate_pairs(policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> Collate:
    """Return a function that collates pairs: row 2i is the chosen answer of pair i, row 2i + 1 the rejected one."""
    return collate_by(preference_collate_fn, policy, tokenizer, add_loss_mask=True)


def collate_by(
    function: Callable[..., Batch],
    policy: PolicyConfig,
    tokenizer: PreTrainedTokenizerBase,
    **options: Any,
) -> Collate:
    """Return a collate function with tokenizer, divisor of row lengths and further options bound."""
    multiple = policy.make_sequence_length_divisible_by
    return partial(function, tokenizer=tokenizer, make_sequence_length_divisible_by=multiple, **options)


def from_section[T](kind: type[T], section: DPOConfig) -> T:
    """Build a dataclass from the keys of the section that have the names of its fields."""
    return kind(**{field.name: getattr(section, field.name) for field in fields(kind)})  # type: ignore[arg-type]
