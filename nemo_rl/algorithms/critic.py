"""Ask a critic for values, train it, and train the policy in several epochs.

    ValueInference ─► (advantages, returns) ─► CriticUpdate ─► PolicyEpochs, the run's trainer

Advantages and returns are fixed before the first update of a step, so the updates of the critic and those of the policy
do not depend on each other, and each model makes all of its epochs in one call. Invariant: a step is one call of
`train` for each model, so weight version and learning-rate schedule advance once in a step, whatever the number of
epochs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nemo_rl.algorithms.runtime.run import StepBatch, Trainer
from nemo_rl.data.model_rows import ROW_INPUTS
from nemo_rl.data.packing import PROMPT_GROUPS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.rows import rows_per_update
from nemo_rl.experience.trajectory import Outcome
from nemo_rl.losses.loss_function import AnyLossFunction, LossFunction
from nemo_rl.models.policy.batching import count_valid
from nemo_rl.models.policy.interfaces import ScoreOutputSpec, TrainResult, ValueOutputSpec
from nemo_rl.utils.errors import DataError

_OF_A_CRITIC = (
    "input_ids",
    "input_lengths",
    "token_mask",
    "sample_mask",
    "values",
    "returns",
    PROMPT_GROUPS,
    ROW_INPUTS,
)
_NOT_OF_A_POLICY = ("values", "values_after", "returns")
"""Columns that the policy's ranks would receive for nothing: its loss reads the advantages that follow from them."""
_OF_THE_BATCH = ("global_valid_seqs", "global_valid_toks", "num_valid_samples", "num_filtered_tokens")
"""Counts of the batch, which several epochs would count several times."""


class Critic(Trainer, Protocol):
    """A model with a scalar head, as the stages see it."""

    def get_values(self, data: BatchedDataDict[Any]) -> BatchedDataDict[ValueOutputSpec]:
        """Return the value of the state before each token."""

    def score(self, data: BatchedDataDict[Any]) -> BatchedDataDict[ScoreOutputSpec]:
        """Return the value of the state after the last token of each row."""


@dataclass(frozen=True)
class ValueInference:
    """The stage that adds the critic's values; a `runtime.run.Stage`."""

    critic: Critic
    """The model that predicts rewards."""
    continues_truncated: bool = False
    """Whether the value after the end of truncated answers is needed."""

    name = "value_inference"
    roles = ("value",)

    def apply(self, batch: StepBatch) -> dict[str, float]:
        """Write `values [B, T]` float32, where position t has the value of the state before token t.

        With `continues_truncated` also `values_after [B]` float32, the value of the state after the last token of the
        rows of truncated samples; 0 for other rows. Samples with several conversations are not continued: their program
        has ended, even if one of its answers was cut.
        """
        tensors = batch.tensors
        tensors["values"] = self.critic.get_values(tensors)["values"]
        if self.continues_truncated:
            truncated = [
                number
                for number, row in enumerate(batch.rows)
                if row.outcome == Outcome.TRUNCATED and row.branch is None
            ]
            tensors["values_after"] = torch.zeros(tensors.size)
            if truncated:
                tensors["values_after"][truncated] = self.critic.score(tensors.select_indices(truncated))["scores"]
        return {}


@dataclass(frozen=True)
class CriticUpdate:
    """The stage that trains the critic on the returns; a `runtime.run.Stage`."""

    critic: Critic
    """The model that is trained."""
    loss_fn: LossFunction
    epochs: int
    """Passes over the samples of the step."""
    samples_per_update: int
    """Samples of one optimizer update."""

    name = "value_training"
    roles = ("value",)

    def apply(self, batch: StepBatch) -> dict[str, float]:
        """Make the updates of the step.

        Returns:
            Metrics: `critic/loss`, `critic/grad_norm`, `critic/lr`, `critic/num_updates`, `critic/skipped_updates` and
            `vf_clipfrac`, as means over the updates or as their number.

        Raises:
            DataError: samples have branches, and do not divide into optimizer updates.
        """
        rows: BatchedDataDict[Any] = BatchedDataDict(
            {name: batch.tensors[name] for name in _OF_A_CRITIC if name in batch.tensors}
        )
        size = rows_per_update(batch.trajectories, self.samples_per_update, "value") or self.samples_per_update
        metrics = train_in_epochs(self.critic, rows, self.loss_fn, size, self.epochs)["metrics"]
        of_critic = ("loss", "grad_norm", "lr", "num_updates", "skipped_updates")
        kept = {f"critic/{name}": metrics[name] for name in of_critic if name in metrics}
        return kept | {name: metrics[name] for name in ("vf_clipfrac",) if name in metrics}


@dataclass(frozen=True)
class PolicyEpochs:
    """Trains the policy in several passes over the samples of a step; a `runtime.run.Trainer`."""

    policy: Trainer
    """The model that is trained."""
    epochs: int
    """Passes over the samples of a step."""
    samples_per_update: int
    """Rows of one optimizer update where the batch does not say it."""
    critic_only_steps: int
    """First steps in which only the critic is trained."""
    step: Callable[[], int]
    """Returns the running step; the first one is 1."""

    def train(
        self, data: BatchedDataDict[Any], loss_fn: AnyLossFunction, *, gbs: int | Sequence[int] | None = None
    ) -> TrainResult:
        """Make all updates of a step, or none in the first steps; see `runtime.run.Trainer`.

        The ranks do not receive values and returns. Counts of samples and tokens in the metrics are those of one epoch.
        """
        if self.step() <= self.critic_only_steps:
            return _nothing_trained(data)
        rows: BatchedDataDict[Any] = BatchedDataDict(
            {name: column for name, column in data.items() if name not in _NOT_OF_A_POLICY}
        )
        result = train_in_epochs(self.policy, rows, loss_fn, gbs or self.samples_per_update, self.epochs)
        metrics = result["metrics"]
        counts = {name: metrics[name] / self.epochs for name in _OF_THE_BATCH if name in metrics}
        return TrainResult(
            loss=result["loss"],
            grad_norm=result["grad_norm"],
            metrics=metrics | counts,
            all_mb_metrics=result["all_mb_metrics"],
        )


def train_in_epochs(
    model: Trainer, data: BatchedDataDict[Any], loss_fn: AnyLossFunction, gbs: int | Sequence[int], epochs: int
) -> TrainResult:
    """Pass over the rows several times, in one call and always in the same order.

    Args:
        model: the model that is trained.
        data: the rows of a step.
        loss_fn: its loss.
        gbs: rows of each optimizer update, or of the updates of one pass.
        epochs: number of passes.

    Raises:
        DataError: the rows do not divide into updates of `gbs` rows; an update has rows of one pass only.
    """
    if epochs == 1:
        return model.train(data, loss_fn, gbs=gbs)
    if isinstance(gbs, int) and data.size % gbs:
        raise DataError(f"{data.size} rows of a step do not divide into optimizer updates of {gbs} rows each.")
    sizes = gbs if isinstance(gbs, int) else [*gbs] * epochs
    return model.train(BatchedDataDict.from_batches([data] * epochs), loss_fn, gbs=sizes)


def _nothing_trained(data: BatchedDataDict[Any]) -> TrainResult:
    """Return the result of a step that does not train the policy, with the counts of its batch."""
    seqs, toks = count_valid(data)
    metrics = {"global_valid_seqs": seqs, "global_valid_toks": toks}
    return TrainResult(loss=torch.zeros(1), grad_norm=torch.zeros(1), metrics=metrics, all_mb_metrics={})
