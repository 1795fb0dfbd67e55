"""Compute the loss, scores, gradients and gradient norm that a proof compares, of one process and of a mesh.

One process scores each row separately, unpadded, with the model's own forward and its own attention. The ranks run
`DTensorBackend` with all settings of the policy section, on microbatches in the layout of a run.

Invariant: every gradient of the one process is compared with the gradient of the mesh, summed over its ranks.

Both sides compute in float64 if the architecture supports it. Norms, softmax, routers and rotary embeddings usually
compute in float32 for any dtype of the model. Their rounding depends on the order of sums and would hide errors below
1e-5. `in_float64` makes this code compute in float64, whose rounding is 1e-12.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.config import PolicyConfig
from nemo_rl.config.rules.topology import row_length_multiple
from nemo_rl.data.common_prefixes import Prefixes
from nemo_rl.data.packing import SHARED_PREFIXES, column_of
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.ranks.placements import whole
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.build import Built, Found, adapted
from nemo_rl.models.dtensor.checkpoints.lazy_weights import LazyWeights
from nemo_rl.models.dtensor.optimizer import clip_gradients
from nemo_rl.models.dtensor.pipeline.stages import copied_parameters, stage_of, sum_shared_gradients
from nemo_rl.models.huggingface.layers import hidden_states
from nemo_rl.models.training.inputs import InputLayout, ModelInputs, build_position_inputs, build_training_inputs

_CPU = torch.device("cpu")
_LENGTHS = ((13, 9), (7, 11, 6))
"""Length in tokens of each row of each microbatch; microbatches differ in shape, and rows are longer than a window."""
_ALIKE = 6
"""Number of tokens of the prompt that all rows of a microbatch share."""
_NEGLIGIBLE = 1e-3
"""A difference is divided by the largest element of its gradient, but at least by this fraction of the model's largest
gradient. The true gradient of some parameters (biases of keys) is zero, so the computed gradient is only rounding."""
_ADAPTED = 0.1


@dataclass
class Reference:
    """Numbers that one process computes."""

    loss: float = 0.0
    """Loss of all rows."""
    scores: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Scores `[b, T - 1]`, or `[b, T]` of a scalar head, by data-parallel rank and microbatch."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradient of every trained parameter, by parameter name."""

    @property
    def norm(self) -> float:
        """Joint 2-norm of all gradients."""
        return math.sqrt(sum(float(gradient.square().sum()) for gradient in self.gradients.values()))

    @property
    def scale(self) -> float:
        """Return the largest absolute element of all gradients."""
        return max((float(gradient.abs().max()) for gradient in self.gradients.values()), default=0.0)


@dataclass
class RankNumbers:
    """Results of one rank: its loss and norm, and its differences from the reference."""

    loss: float
    """Loss of the rank's rows; 0 on ranks that report no results (`ParallelLayout.result_ranks`)."""
    norm: float
    """Joint 2-norm of all gradients."""
    scores: float
    """Largest difference of a score, divided by the largest score."""
    gradients: dict[str, float]
    """Largest difference of each gradient, divided by the gradient's largest element, by name."""


@dataclass(frozen=True)
class Task:
    """The model, settings and rows that both sides use."""

    probe_model: PreTrainedModel
    """The small model, with weights."""
    policy: PolicyConfig
    """Policy section with the settings of the run, for the small mesh."""
    layout: ParallelLayout
    """The small mesh."""
    found: Found
    """Features that the architecture supports."""

    def model(self) -> Any:
        """Return a wrapped copy of the small model in its dtype, with random values in its adapters."""
        dtype = next(self.probe_model.parameters()).dtype
        model = adapted(deepcopy(self.probe_model), self.policy, self.found, seed=0).to(dtype)
        if dtype == torch.float64:
            model.hf.set_experts_implementation("eager")  # grouped matrix products lack float64
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.hf.named_parameters():
            if name.endswith("lora_B"):  # if B were zero, errors in A would have no effect
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.data.copy_(_ADAPTED * noise)
        return model

    @property
    def scores(self) -> bool:
        """Return True for a model with a scalar head: a reward model or a critic."""
        return self.policy.reward_model_cfg.enabled

    def microbatches(self, dp_rank: int) -> Iterator[BatchedDataDict[Any]]:
        """Yield the microbatches of a data-parallel rank, right padded, with a weight for each token's score."""
        text = self.probe_model.config.get_text_config()
        padding = getattr(text, "pad_token_id", None)  # a scoring head finds the end of a row by it
        for index, lengths in enumerate(_LENGTHS):
            generator = torch.Generator().manual_seed(10 * dp_rank + index)
            shape = (len(lengths), max(lengths))
            real = torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None]
            ids = torch.randint(3, text.vocab_size, shape, generator=generator)
            ids[:, :_ALIKE] = ids[:1, :_ALIKE]
            ids = ids if padding is None else torch.where(ids == padding, 1, ids)
            yield BatchedDataDict(
                {
                    "input_ids": ids * real,
                    "input_lengths": torch.tensor(lengths),
                    "token_mask": (real & (torch.arange(shape[1]) >= _ALIKE - 1)).float(),
                    "sample_mask": torch.ones(len(lengths)),
                    "weights": torch.randn(shape[0], shape[1] - (not self.scores), generator=generator),
                }
            )


def one_process(task: Task) -> Reference:
    """Compute the reference numbers with the model's own forward, row by row."""
    hf = task.model().hf
    if hf._can_set_attn_implementation():
        hf.set_attn_implementation("eager")
    hf.train()
    reference = Reference()
    for dp_rank in range(task.layout.data_parallel_size):
        for index, rows in enumerate(task.microbatches(dp_rank)):
            scores = torch.zeros(rows["weights"].shape, dtype=torch.float64)
            for row, length in enumerate(rows["input_lengths"].tolist()):
                given = _scores_of_row(task, hf, rows, row, length)
                loss = -(given * rows["weights"][row, : len(given)]).sum()
                loss.backward()
                reference.loss += loss.item()
                scores[row, : len(given)] = given.detach()
            reference.scores[dp_rank, index] = scores
    for name, parameter in hf.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            reference.gradients[name] = gradient.detach()
    return reference


def _scores_of_row(task: Task, hf: PreTrainedModel, rows: BatchedDataDict[Any], row: int, length: int) -> Tensor:
    """Return the scores of one row's tokens after the prompt, or of every position for a scalar head.

    With a scalar head, the model's own forward scores only the last position. Its head is called for all others.
    """
    ids = rows["input_ids"][row : row + 1, :length]
    logits = hf(input_ids=ids, use_cache=False).logits
    if task.scores:
        head: Any = hf.score
        before = head(hidden_states(hf, {"input_ids": ids}))[0, :-1, 0]
        return torch.cat([before, logits.flatten()]).double()
    logprobs = torch.log_softmax(logits[0, :-1].double(), dim=-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
    counted: Tensor = rows["token_mask"][row, 1:length]
    return logprobs * counted


def on_mesh(task: Task, reference: Reference) -> RankNumbers:
    """Compute the results of this rank. The call is collective over the ranks of the mesh."""
    built = Built(task.model(), LazyWeights(), task.found.shares_prompts)
    options: dict[str, Any] = {"init_optimizer": False, "init_reference_model": False}
    backend = DTensorBackend(task.policy, _CPU, task.layout, build=lambda *_: built, **options)
    dp_rank = task.layout.data_parallel_rank(dist.get_rank())
    counts = dist.get_rank() in task.layout.result_ranks
    rows = list(task.microbatches(dp_rank))
    inputs = [_laid_out(task, backend, each) for each in rows]
    losses: list[float] = []
    errors: list[float] = [0.0]

    def compare(index: int, scores_K: Tensor) -> Tensor:
        scattered = inputs[index].scatter(scores_K)
        want = reference.scores[dp_rank, index]
        if counts:
            errors.append(_relative(scattered.detach(), want, float(want.abs().max())))
        return scattered

    def score(index: int, scores_K: Tensor, entropy_K: Tensor) -> None:
        compare(index, scores_K)

    def train(index: int, scores_K: Tensor, entropy_K: Tensor) -> Tensor:
        loss = -(compare(index, scores_K) * rows[index]["weights"]).sum()
        losses.append(loss.item())
        return loss

    backend.run(inputs, score, backward=False)
    backend.run(inputs, train, backward=True)
    norm, gradients = _gradients(backend)
    found = {name: _relative(gradient, reference.gradients[name], reference.scale) for name, gradient in gradients}
    return RankNumbers(sum(losses) if counts else 0.0, norm, max(errors), found)


def _laid_out(task: Task, backend: DTensorBackend, rows: BatchedDataDict[Any]) -> ModelInputs:
    packed = task.policy.sequence_packing.enabled
    layout = InputLayout(packed, row_length_multiple(task.policy))
    if packed and backend.shares_prompts:
        numbers = list(range(rows.size))
        rows[SHARED_PREFIXES] = column_of(Prefixes(numbers, [0, *[_ALIKE - 1] * (rows.size - 1)]), numbers)
    build = build_position_inputs if task.scores else build_training_inputs
    return build(rows, layout, _CPU)


def _gradients(backend: DTensorBackend) -> tuple[float, Iterator[tuple[str, Tensor]]]:
    """Return norm and whole gradients of this rank's stage, by names of the whole model. The call is collective."""
    hf, stage = backend.model.hf, stage_of(backend.model.hf)
    sum_shared_gradients(hf)
    norm = clip_gradients(
        backend.model.parameters(),
        None,
        copies=copied_parameters(hf),
        sum_over_stages=stage.sum if stage is not None else None,
    )

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in hf.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                yield name if stage is None else stage.known_as(name), whole(gradient)

    return norm, gathered()


def _relative(got: Tensor, want: Tensor, scale: float) -> float:
    """Return the largest difference divided by the largest wanted number, or infinity if a number is not finite."""
    size = max(float(want.abs().max()), _NEGLIGIBLE * scale) if want.numel() else 1.0
    worst = float((got.double() - want.double()).abs().max()) if want.numel() else 0.0
    return worst / size if size and math.isfinite(worst) else (0.0 if worst == 0 else math.inf)


@contextmanager
def in_float64() -> Iterator[None]:
    """Run a block in which code of this thread that asks for float32 computes in float64. The model is in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wider():
            yield
    finally:
        torch.set_default_dtype(before)


class _Wider(TorchFunctionMode):
    """Mode that replaces float32 with float64 in every torch call."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        wide = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **wide)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
