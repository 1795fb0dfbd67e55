"""Turn one microbatch of rows into model inputs, and scored tokens back into `[b, T - 1]`.

Between the data (`[b, T]`, right padded) and a backend's forward. A microbatch runs either padded,
trimmed to its longest row, or packed: all rows laid end to end in one row with restarting positions,
those with the same prompt behind one copy of it (`shared_prompts`) where that is asked for.
No attention mask is made: with right padding and causal attention no real token sees padding, and an
all-ones mask would switch transformers' own packing detection off.

Invariant: the loss sees the same `[b, T - 1]` log-probabilities, in the same places, either way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nemo_rl.data.packing import find_families
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_logprobs import TopK
from nemo_rl.host.device import to_device
from nemo_rl.models.training.shared_prompts import share_prompts

type Places = Callable[[Tensor, Tensor], Tensor]
"""Rows and columns of tokens to their places in the flattened model tokens."""


@dataclass(frozen=True)
class InputLayout:
    """How rows become model inputs.

    Attributes:
        packed: lay rows end to end instead of padding them.
        round_to: the model's sequence length is rounded up to a multiple of this many tokens.
        shares_prompts: packed rows with the same prompt have one copy of it.
    """

    packed: bool
    round_to: int = 1
    shares_prompts: bool = False


@dataclass(frozen=True)
class ModelInputs:
    """What a backend's forward needs for one microbatch, K tokens being scored.

    Attributes:
        model_inputs: keyword arguments of the model.
        positions_K: indices into the flattened model tokens whose successor is scored.
        targets_K: token ids of the successors; `[K, k]` where k ids are scored at each position.
        places_K: where the scores go in the flattened `[b, T - 1]`.
        shape: `(b, T - 1)`.
        unfiltered: score under the temperature that the policy samples with, but without top-k and top-p.
        top_k: give the largest logits of each position and their ids instead of scoring targets.
        real_tokens: `[b, T]` bool like `input_ids`, False on padding; None: all are real.
    """

    model_inputs: dict[str, Any]
    positions_K: Tensor
    targets_K: Tensor
    places_K: Tensor
    shape: tuple[int, int]
    unfiltered: bool = False
    top_k: TopK | None = None
    real_tokens: Tensor | None = None

    def scatter(self, values_K: Tensor) -> Tensor:
        """Put per-token values at their places in `[b, T - 1]`, zeros elsewhere; differentiable.

        Args:
            values_K: `[K]`, or `[K, k]` for `[b, T - 1, k]`.
        """
        num_rows, width = self.shape
        flat = values_K.new_zeros((num_rows * width, *values_K.shape[1:])).index_copy(0, self.places_K, values_K)
        return flat.view(num_rows, width, *values_K.shape[1:])


def training_targets(rows: BatchedDataDict[Any]) -> Tensor:
    """`[b, T - 1]` bool: targets the loss can count (token_mask of the successor, and sample_mask)."""
    return (rows["token_mask"][:, 1:] > 0) & (rows["sample_mask"][:, None] > 0)


def all_targets(rows: BatchedDataDict[Any]) -> Tensor:
    """`[b, T - 1]` bool: every real token that has a predecessor."""
    index = torch.arange(1, rows["input_ids"].shape[1])
    return index[None, :] < rows["input_lengths"][:, None]


def build_model_inputs(
    rows: BatchedDataDict[Any], wanted: Tensor, layout: InputLayout, device: torch.device
) -> ModelInputs:
    """Lay out the rows of one microbatch.

    Args:
        rows: `input_ids [b, T]` right padded and `input_lengths [b]`, on the CPU.
        wanted: `[b, T - 1]` bool; entry t asks for the score of token t + 1.
        layout: padded or packed.
        device: where the model runs.
    """
    input_ids = rows["input_ids"]
    num_rows, width = input_ids.shape
    wanted = wanted & (torch.arange(1, width)[None, :] < rows["input_lengths"][:, None])
    row_K, column_K = wanted.nonzero(as_tuple=True)
    model_inputs, places, real = _lay_out(rows, layout)
    return ModelInputs(
        model_inputs=_on(device, model_inputs),
        positions_K=to_device(places(row_K, column_K), device),
        targets_K=to_device(input_ids[row_K, column_K + 1], device),
        places_K=to_device(row_K * (width - 1) + column_K, device),
        shape=(num_rows, width - 1),
        real_tokens=to_device(real, device),
    )


def build_training_inputs(rows: BatchedDataDict[Any], layout: InputLayout, device: torch.device) -> ModelInputs:
    """`build_model_inputs` for the targets that a loss can count."""
    return build_model_inputs(rows, training_targets(rows), layout, device)


def build_distillation_inputs(rows: BatchedDataDict[Any], layout: InputLayout, device: torch.device) -> ModelInputs:
    """`build_training_inputs` whose targets are the teacher's top-k tokens, under the softmax of all tokens.

    Args:
        rows: keys of a training batch, and `teacher_topk_indices [b, T, k]`, whose position t belongs to the
            distribution after token t.
        layout: padded or packed.
        device: where the model runs.
    """
    inputs = build_training_inputs(rows, layout, device)
    num_rows, width = inputs.shape
    indices = to_device(rows["teacher_topk_indices"][:, :width], device)
    targets_Kk = indices.reshape(num_rows * width, -1).index_select(0, inputs.places_K).long()
    return replace(inputs, targets_K=targets_Kk, unfiltered=True)


def build_score_inputs(rows: BatchedDataDict[Any], layout: InputLayout, device: torch.device) -> ModelInputs:
    """Lay out the rows of one microbatch to be scored as wholes: K = b, at each row's last token.

    Args:
        rows: `input_ids [b, T]` right padded and `input_lengths [b]`, on the CPU.
        layout: padded or packed.
        device: where the model runs.
    """
    input_ids, last_B = rows["input_ids"], rows["input_lengths"] - 1
    model_inputs, places, real = _lay_out(rows, layout)
    row_B = torch.arange(len(last_B))
    return ModelInputs(
        model_inputs=_on(device, model_inputs),
        positions_K=to_device(places(row_B, last_B), device),
        targets_K=to_device(input_ids[row_B, last_B], device),
        places_K=to_device(row_B, device),
        shape=(len(last_B), 1),
        real_tokens=to_device(real, device),
    )


def build_topk_inputs(rows: BatchedDataDict[Any], top: TopK, layout: InputLayout, device: torch.device) -> ModelInputs:
    """Lay out the rows of one microbatch for the largest logits of every real token, the last one included.

    Args:
        rows: `input_ids [b, T]` right padded and `input_lengths [b]`, on the CPU.
        top: which logits of each token.
        layout: padded or packed.
        device: where the model runs.

    Returns:
        Inputs whose `shape` is `(b, T)`: position t belongs to the logits that the model gives after token t.
    """
    input_ids, lengths = rows["input_ids"], rows["input_lengths"]
    num_rows, width = input_ids.shape
    row_K, column_K = (torch.arange(width)[None, :] < lengths[:, None]).nonzero(as_tuple=True)
    model_inputs, places, real = _lay_out(rows, layout)
    return ModelInputs(
        model_inputs=_on(device, model_inputs),
        positions_K=to_device(places(row_K, column_K), device),
        targets_K=to_device(input_ids[row_K, column_K], device),
        places_K=to_device(row_K * width + column_K, device),
        shape=(num_rows, width),
        top_k=top,
        real_tokens=to_device(real, device),
    )


def with_positions(inputs: ModelInputs) -> ModelInputs:
    """The same inputs with explicit positions, for a model that does not see whole rows."""
    ids = inputs.model_inputs["input_ids"]
    if "position_ids" in inputs.model_inputs:
        return inputs
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return replace(inputs, model_inputs=inputs.model_inputs | {"position_ids": positions})


def packed_model_inputs(segments: list[Tensor]) -> dict[str, Any]:
    """Lay 1-D token tensors end to end as the model's keyword arguments.

    Args:
        segments: non-empty 1-D int64 tensors on one device.

    Returns:
        `input_ids [1, N]`, `position_ids [1, N]` restarting at 0 in each segment, `cu_seq_lens_q` and
        `cu_seq_lens_k` `[S + 1]` int32, `max_length_q` and `max_length_k` ints.
    """
    device = segments[0].device
    lengths = [len(segment) for segment in segments]
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    return {
        "input_ids": torch.cat(segments)[None],
        "position_ids": positions[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def _lay_out(rows: BatchedDataDict[Any], layout: InputLayout) -> tuple[dict[str, Any], Places, Tensor]:
    """The model's arguments, where in the flattened model tokens those of the rows are, and which of these are real."""
    input_ids, lengths = rows["input_ids"], rows["input_lengths"].tolist()
    families = find_families(rows) if layout.packed and layout.shares_prompts else []
    if any(family.shared for family in families):
        shared = share_prompts(input_ids, lengths, families, layout.round_to)
        model_inputs, ends = shared.model_inputs, torch.tensor([shared.num_tokens])
        places: Places = shared.places
    elif layout.packed:
        model_inputs = _packed(input_ids, lengths, layout.round_to)
        places, ends = _from(torch.tensor([0, *lengths[:-1]]).cumsum(0)), torch.tensor([sum(lengths)])
    else:
        model_inputs = _padded(input_ids, lengths, layout.round_to)
        starts = torch.arange(len(lengths)) * model_inputs["input_ids"].shape[1]
        places, ends = _from(starts), torch.tensor(lengths)
    return model_inputs, places, torch.arange(model_inputs["input_ids"].shape[1])[None, :] < ends[:, None]


def _from(starts_B: Tensor) -> Places:
    """Places of tokens of rows that lie in one piece."""
    return lambda row_K, column_K: starts_B[row_K] + column_K


def _on(device: torch.device, model_inputs: dict[str, Any]) -> dict[str, Any]:
    sent = {key: to_device(value, device) for key, value in model_inputs.items() if isinstance(value, Tensor)}
    return model_inputs | sent


def _padded(input_ids: Tensor, lengths: Sequence[int], round_to: int) -> dict[str, Any]:
    """Rows trimmed to the longest one, rounded up; columns beyond the data hold token 0."""
    longest = round_up(max(lengths), round_to)
    trimmed = input_ids[:, :longest]
    missing = longest - trimmed.shape[1]
    return {"input_ids": torch.nn.functional.pad(trimmed, (0, missing))}


def _packed(input_ids: Tensor, lengths: Sequence[int], round_to: int) -> dict[str, Any]:
    """Rows laid end to end; the rounding is a segment of its own, which nothing attends to."""
    segments = [row[:length] for row, length in zip(input_ids, lengths, strict=True)]
    filler = round_up(sum(lengths), round_to) - sum(lengths)
    if filler:
        segments.append(torch.zeros(filler, dtype=input_ids.dtype))
    return packed_model_inputs(segments)


def round_up(number: int, multiple: int) -> int:
    """The first multiple that is not below a number."""
    return -(-number // multiple) * multiple
