"""Run the worker of one rank that trains many adapters on one frozen base.

`models.policy.adapter_policy` calls one worker per rank. Flow of a pass on one rank:

    rows + microbatch sizes ─► ModelInputs ─► backend.run with the adapter ─► log-probabilities, loss
                                                     └─► gradients, summed over ranks ─► added to the adapter's

Invariants: a pass of one adapter has the same bits whatever other adapters do; passes of several adapters may share
the base, at the price of these bits. All ranks hold equal adapters, and make the same calls. A request that cannot be
served changes nothing: the method returns a `Refusal`, because an error would end all ranks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
from nemo_rl.models.adapters.shared_passes import TokenShares
from nemo_rl.models.adapters.slots import AdapterSlots
from nemo_rl.models.adapters.tensors import AdapterShape, AdapterTensors, new_adapter
from nemo_rl.models.adapters.training import AdamParams, TrainedAdapter
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.models.huggingface.sizes import expert_parameters_of
from nemo_rl.models.policy.workers.rank import PolicyRank, PolicyWorker
from nemo_rl.models.training.inputs import ModelInputs, build_given_inputs, split_rows
from nemo_rl.models.training.interfaces import ForwardStep, PolicyBackend
from nemo_rl.models.training.tensor_checks import on_all_ranks
from nemo_rl.utils.errors import CheckpointError, DataError

LOSS_INPUTS = "loss_inputs"
"""Prefix of the columns of a batch with the inputs of the loss, `[b, T, k]`."""
ADAPTER_OF_ROW = "adapter_of_row"
"""Column of a batch with the number of each row's adapter among those of the pass, `[b]` int64."""


@dataclass(frozen=True)
class Refusal:
    """A request that cannot be served."""

    reason: str
    """Sentence for the client."""


@dataclass(frozen=True, eq=False)
class PassPart:
    """One rank's part of a pass."""

    losses: Sequence[float | Refusal]
    """For each adapter the sum of the loss over its rows on this rank, or the refusal of the whole pass."""
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

    def run_passes(
        self,
        data: BatchedDataDict[Any],
        sizes: Sequence[int],
        adapters: Sequence[str],
        loss: NamedLoss,
        backward: bool,
    ) -> PassPart:
        """Compute a loss of this rank's rows with their adapters, and add its gradients to the adapters' if wanted.

        Args:
            data: `input_ids [b, T]`, `input_lengths [b]`, `sample_mask [b]`, `adapter_of_row [b]`, `target_tokens
                [b, T, k]`, and the loss's inputs `[b, T, k]` with names of the prefix `LOSS_INPUTS`. The rows are in
                microbatch order.
            sizes: Number of rows of each microbatch.
            adapters: Different adapters, in the order of the numbers in `adapter_of_row`.
        """
        microbatches = list(split_rows(data, sizes))
        inputs = [build_given_inputs(rows, self._layout, self.backend.device) for rows in microbatches]
        losses: list[list[Tensor]] = []
        logprobs: list[Tensor] = []

        def forward_step(index: int, scores_Kk: Tensor, entropy_K: Tensor) -> Tensor:
            rows = microbatches[index].to(self.backend.device)
            x = inputs[index].scatter(scores_Kk)
            terms = loss_terms(loss.name, x, _loss_inputs(rows), loss.settings)
            losses.append([masked_sum(terms, _rows_of(rows, number)) for number in range(len(adapters))])
            logprobs.append(to_host(x.detach().float()))
            return sum(losses[-1][1:], losses[-1][0])

        self._compute(adapters, microbatches, inputs, forward_step, backward)
        totals = [sum(value.item() for value in values) for values in zip(*losses, strict=True)]
        added = self._added(dict(zip(adapters, totals, strict=True)), backward)
        return PassPart(added, self._given(logprobs))

    def _compute(
        self,
        adapters: Sequence[str],
        microbatches: Sequence[BatchedDataDict[Any]],
        inputs: Sequence[ModelInputs],
        forward_step: ForwardStep,
        backward: bool,
    ) -> None:
        """Run the microbatches with one adapter, or each of them with the adapters of its rows."""
        tensors = [self._trained[name].tensors for name in adapters]
        if len(adapters) == 1:
            with self._slots.using(tensors[0]):
                self.backend.run(inputs, forward_step, backward=backward)
            return
        for number, (rows, given) in enumerate(zip(microbatches, inputs, strict=True)):
            shares = _shares_of(given, rows[ADAPTER_OF_ROW], len(adapters))
            with self._slots.shared_by(tensors, shares):
                self.backend.run([given], partial(_as_number, forward_step, number), backward=backward)

    def _added(self, losses: Mapping[str, float], backward: bool) -> list[float | Refusal]:
        """Add the gradients of a pass, or refuse all of it if a loss or gradient is not finite on any rank."""
        gradients = {name: self._trained[name].take_gradients() if backward else {} for name in losses}
        wrong = [f"The loss is {loss}" for loss in losses.values() if not math.isfinite(loss)]
        if not all(bool(value.isfinite().all()) for own in gradients.values() for value in own.values()):
            wrong.append("The gradient is not finite")
        wrong = on_all_ranks(wrong)
        if wrong:
            why = f"{wrong[0]}, so nothing was added to the gradients. Look for extreme inputs of the loss."
            return [Refusal(why)] * len(losses)
        for name, own in gradients.items():
            self._trained[name].add_gradients(own)
        return list(losses.values())

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


def _as_number(forward_step: ForwardStep, number: int, _: int, *scores: Tensor) -> Tensor | None:
    """Call the function for a microbatch by its number among all, where the backend runs it alone."""
    return forward_step(number, *scores)


def _shares_of(inputs: ModelInputs, adapter_of_row: Tensor, num_adapters: int) -> TokenShares:
    """Divide the tokens of a microbatch, in which every real token is scored, among its adapters.

    Args:
        adapter_of_row: `[b]` number of the adapter of each row.
    """
    row_K = inputs.places_K // inputs.shape[1]
    adapter_K = adapter_of_row.to(row_K.device).index_select(0, row_K)
    scored = [(adapter_K == number).nonzero()[:, 0] for number in range(num_adapters)]
    tokens = [inputs.positions_K.index_select(0, places) for places in scored]
    return TokenShares(inputs.model_inputs["input_ids"].numel(), tokens, scored)


def _rows_of(rows: BatchedDataDict[Any], number: int) -> Tensor:
    """Return the mask `[b, 1, 1]` of the rows of an adapter, float64."""
    return (rows["sample_mask"].double() * (rows[ADAPTER_OF_ROW] == number))[:, None, None]


def _loss_inputs(rows: BatchedDataDict[Any]) -> dict[str, Tensor]:
    """Return the inputs of the loss by their names."""
    prefix = f"{LOSS_INPUTS}."
    return {key.removeprefix(prefix): rows[key] for key in rows if key.startswith(prefix)}


class AdapterRank(PolicyRank, AdapterWorker):
    """The worker of one rank with adapters, with its process group and its backend."""
