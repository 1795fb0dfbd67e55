"""Run the worker of one rank that trains many adapters on one frozen base.

`models.policy.adapter_policy` calls one worker per rank. Flow of a pass on one rank:

    rows + microbatch sizes ─► ModelInputs ─► backend.run with the adapter ─► log-probabilities, loss
                                                     └─► gradients, summed over ranks ─► added to the adapter's

Invariants: a pass computes the rows of one adapter. All ranks hold equal adapters, and make the same calls. A request
that cannot be served changes nothing: the method returns a `Refusal`, because an error would end all ranks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.host.device import to_host
from nemo_rl.losses.reductions import masked_sum
from nemo_rl.losses.token_sums import loss_terms
from nemo_rl.models.adapters.files import (
    BaseModel,
    read_adapter_folder,
    read_optimizer_state,
    write_adapter_folder,
)
from nemo_rl.models.adapters.slots import AdapterSlots
from nemo_rl.models.adapters.tensors import AdapterShape, AdapterTensors, new_adapter
from nemo_rl.models.adapters.training import AdamParams, TrainedAdapter
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.models.huggingface.sizes import expert_parameters_of
from nemo_rl.models.policy.workers.rank import PolicyRank, PolicyWorker
from nemo_rl.models.training.inputs import build_given_inputs, split_rows
from nemo_rl.models.training.interfaces import PolicyBackend
from nemo_rl.models.training.tensor_checks import on_all_ranks
from nemo_rl.utils.errors import CheckpointError, DataError

LOSS_INPUTS = "loss_inputs"
"""Prefix of the columns of a batch with the inputs of the loss, `[b, T, k]`."""


@dataclass(frozen=True)
class Refusal:
    """A request that cannot be served."""

    reason: str
    """Sentence for the client."""


@dataclass(frozen=True, eq=False)
class PassPart:
    """One rank's part of a pass."""

    loss: float
    """Sum of the loss over this rank's rows."""
    logprobs: Tensor
    """`[b, T, k]` float32 log-probabilities of the targets."""


@dataclass(frozen=True)
class NamedLoss:
    """A loss that `losses.token_sums.check_loss` has accepted."""

    name: str
    """Name of the loss."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """All settings of the loss."""


class AdapterWorker(PolicyWorker):
    """One rank with a frozen base and many adapters.

    Args:
        backend: backend whose modules have slots.
        config: the section `policy`.
        gives_scores: whether this rank returns scores (`ParallelLayout.result_ranks`).
    """

    def __init__(self, backend: PolicyBackend, config: PolicyConfig, *, gives_scores: bool = True) -> None:
        super().__init__(backend, config, gives_scores=gives_scores)
        self._slots = AdapterSlots.of(backend.modules_here())
        described = load_model_config(config.model_name, config.hf_config_overrides)
        self._base = BaseModel(config.model_name, expert_parameters_of(described) > 0)
        self._trained: dict[str, TrainedAdapter] = {}
        self._samplers: dict[str, AdapterTensors] = {}

    def create_adapter(self, name: str, shape: AdapterShape) -> Refusal | None:
        """Add an adapter that has no effect, with a new optimizer."""
        try:
            made = new_adapter(shape, self._slots.sizes, self._slots.head, self.backend.device)
        except DataError as error:
            return Refusal(str(error))
        self._trained[name] = TrainedAdapter(made)
        return None

    def run_pass(
        self, data: BatchedDataDict[Any], sizes: Sequence[int], adapter: str, loss: NamedLoss, backward: bool
    ) -> PassPart | Refusal:
        """Compute a loss of this rank's rows with an adapter, and add its gradient to the adapter's if wanted.

        Args:
            data: `input_ids [b, T]`, `input_lengths [b]`, `sample_mask [b]`, `target_tokens [b, T, k]` and the loss's
                inputs `[b, T, k]` with names of the prefix `LOSS_INPUTS`, in microbatch order.
            sizes: Number of rows of each microbatch.
        """
        microbatches = list(split_rows(data, sizes))
        inputs = [build_given_inputs(rows, self._layout, self.backend.device) for rows in microbatches]
        losses: list[Tensor] = []
        logprobs: list[Tensor] = []

        def forward_step(index: int, scores_Kk: Tensor, entropy_K: Tensor) -> Tensor:
            rows = microbatches[index].to(self.backend.device)
            x = inputs[index].scatter(scores_Kk)
            terms = loss_terms(loss.name, x, _loss_inputs(rows), loss.settings)
            losses.append(masked_sum(terms, rows["sample_mask"].double()[:, None, None]))
            logprobs.append(to_host(x.detach().float()))
            return losses[-1]

        trained = self._trained[adapter]
        with self._slots.using(trained.tensors):
            self.backend.run(inputs, forward_step, backward=backward)
        part = PassPart(sum(value.item() for value in losses), self._given(logprobs))
        return self._added(part, trained, backward)

    def _added(self, part: PassPart, trained: TrainedAdapter, backward: bool) -> PassPart | Refusal:
        """Add the gradients of a pass, or refuse all of it if its loss or gradient is not finite on any rank."""
        gradients = trained.take_gradients() if backward else {}
        wrong = [] if math.isfinite(part.loss) else [f"The loss is {part.loss}"]
        if not all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
            wrong.append("The gradient is not finite")
        wrong = on_all_ranks(wrong)
        if wrong:
            return Refusal(f"{wrong[0]}, so nothing was added to the gradients. Look for extreme inputs of the loss.")
        trained.add_gradients(gradients)
        return part

    def update_adapter(self, name: str, params: AdamParams) -> float | Refusal:
        """Make an update, and return the norm of the gradient before clipping."""
        try:
            return self._trained[name].update(params)
        except DataError as error:
            return Refusal(str(error))

    def save_adapter(self, name: str, folder: str, with_optimizer: bool) -> Refusal | None:
        """Write an adapter into a new folder. Only one rank is called."""
        trained = self._trained[name]
        return self._write(trained.tensors, folder, trained.state() if with_optimizer else None)

    def load_adapter(self, name: str, folder: str, with_optimizer: bool) -> AdapterShape | Refusal:
        """Add the adapter of a folder, with its optimizer or a new one, and return its shape."""
        state: dict[str, Tensor] = {}
        wrong: list[str] = []
        try:
            read = read_adapter_folder(Path(folder), self._slots, self.backend.device)
            state = read_optimizer_state(Path(folder), read) if with_optimizer else {}
        except CheckpointError as error:
            wrong = [str(error)]
        wrong = on_all_ranks(wrong)
        if wrong:
            return Refusal(wrong[0])
        self._trained[name] = TrainedAdapter(read)
        self._trained[name].put_state(state)
        return read.shape

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter."""
        del self._trained[name]

    def keep_sampler(self, sampler: str, adapter: str) -> None:
        """Keep the current weights of an adapter as a sampler."""
        self._samplers[sampler] = self._trained[adapter].tensors.copied()

    def load_sampler(self, sampler: str, folder: str) -> Refusal | None:
        """Keep the adapter of a folder as a sampler."""
        wrong: list[str] = []
        try:
            read = read_adapter_folder(Path(folder), self._slots, self.backend.device)
        except CheckpointError as error:
            wrong = [str(error)]
        wrong = on_all_ranks(wrong)
        if wrong:
            return Refusal(wrong[0])
        self._samplers[sampler] = read
        return None

    def save_sampler(self, sampler: str, folder: str) -> Refusal | None:
        """Write the adapter of a sampler into a new folder. Only one rank is called."""
        return self._write(self._samplers[sampler], folder, None)

    def sampler_tensors(self, sampler: str) -> AdapterTensors:
        """Return the adapter of a sampler on the CPU. Only one rank is called."""
        return self._samplers[sampler].copied(torch.device("cpu"))

    def drop_sampler(self, sampler: str) -> None:
        """Forget a sampler."""
        del self._samplers[sampler]

    def score_given(self, data: BatchedDataDict[Any], sizes: Sequence[int], sampler: str | None) -> Tensor:
        """Return the log-probabilities `[b, T, k]` of `target_tokens` after every token, under a sampler or the base.

        Args:
            data: As in `run_pass`, without inputs of a loss.
            sizes: Number of rows of each microbatch.
        """
        inputs = [build_given_inputs(rows, self._layout, self.backend.device) for rows in split_rows(data, sizes)]
        scores: list[Tensor] = []

        def forward_step(index: int, scores_Kk: Tensor, entropy_K: Tensor) -> None:
            scores.append(to_host(inputs[index].scatter(scores_Kk).float()))

        with self._slots.using(None if sampler is None else self._samplers[sampler]):
            self.backend.run(inputs, forward_step, backward=False)
        return self._given(scores)

    def score_most_likely(
        self, data: BatchedDataDict[Any], sizes: Sequence[int], sampler: str | None, top_k: int
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and ids of the most likely tokens after every token, each `[b, T, top_k]`."""
        with self._slots.using(None if sampler is None else self._samplers[sampler]):
            return self.get_topk_logits(data, sizes, top_k, temperature=1.0)

    def _write(self, adapter: AdapterTensors, folder: str, state: Mapping[str, Tensor] | None) -> Refusal | None:
        try:
            write_adapter_folder(Path(folder), adapter, self._base, state)
        except CheckpointError as error:
            return Refusal(str(error))
        return None


def _loss_inputs(rows: BatchedDataDict[Any]) -> dict[str, Tensor]:
    """Return the inputs of the loss by their names."""
    prefix = f"{LOSS_INPUTS}."
    return {key.removeprefix(prefix): rows[key] for key in rows if key.startswith(prefix)}


class AdapterRank(PolicyRank, AdapterWorker):
    """The worker of one rank with adapters, with its process group and its backend."""
