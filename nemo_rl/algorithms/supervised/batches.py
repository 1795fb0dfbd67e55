"""Draws the batch of a step from written data; a batch is one optimizer update."""

from nemo_rl.algorithms.runtime.run import Phase, StepBatch
from nemo_rl.data.prompt_stream import PromptStream


class WrittenBatches:
    """Draws batches of rows; a `runtime.run.BatchSource`.

    Args:
        rows: batches, epoch after epoch.
        rows_per_sample: rows of a batch that one sample takes; 2 for pairs.
    """

    def __init__(self, rows: PromptStream, rows_per_sample: int):
        self._rows = rows
        self._rows_per_sample = rows_per_sample

    def next_batch(self, step: int, phase: Phase) -> StepBatch:
        """See `BatchSource.next_batch`."""
        with phase("data_processing"):
            batch = self._rows.next_batch()
        tensors = batch.rows
        num_samples = tensors.size // self._rows_per_sample
        metrics = {"total_num_tokens": float(tensors["input_lengths"].sum()), "num_samples": float(num_samples)}
        return StepBatch(
            tensors, num_prompts=num_samples, metrics=metrics, rows_per_update=tensors.size, prompts=batch.positions
        )

    def trained(self, step: int, batch: StepBatch) -> None:
        """See `BatchSource.trained`."""
        self._rows.acknowledge(batch.prompts)
