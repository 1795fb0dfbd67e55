"""Convert a microbatch of rows to model inputs, and the scores of tokens back to `[b, T - 1]`.

A microbatch (`[b, T]`, right padded) is either padded and trimmed to its longest row, or packed: all rows are
concatenated to one row, and positions restart in each. Packed rows have one copy of the tokens that they share, if the
driver has found such tokens (`shared_prefixes`). There is no attention mask: with right padding and causal attention,
no real token sees padding, and an all-ones mask would disable transformers' own packing detection.

Invariant: the loss gets the same `[b, T - 1]` log-probabilities, in the same places, padded or packed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nemo_rl.data.images.rows import shared_images
from nemo_rl.data.model_rows import (
    ROW_INPUTS,
    TOKEN_ARGUMENTS,
    forward_arguments,
    has_position_rule,
    lacks_images,
    position_ids,
    shared_position_ids,
)
from nemo_rl.data.packing import SHARED_PREFIXES, prefixes_of
from nemo_rl.data.routed_experts import ROUTED_EXPERTS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_logprobs import TopK
from nemo_rl.host.device import to_device
from nemo_rl.losses.cross_tokenizer import candidates_of
from nemo_rl.models.expert_routing import laid_out
from nemo_rl.models.training.shared_prefixes import share_prefixes, spread

type Places = Callable[[Tensor, Tensor], Tensor]
"""Function from rows and columns of tokens to their indices in the flattened model tokens."""


@dataclass(frozen=True)
class InputLayout:
    """The layout of rows as model inputs."""

    packed: bool
    """Whether rows are concatenated instead of being padded."""
    round_to: int = 1
    """The model's sequence length is rounded up to a multiple of this number."""


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of a backend's forward for one microbatch, in which K tokens are scored."""

    model_inputs: dict[str, Any]
    """Keyword arguments of the model."""
    positions_K: Tensor
    """Indices of the flattened model tokens whose successor is scored."""
    targets_K: Tensor
    """Token ids of the successors. `[K, k]` if k ids are scored at each position."""
    places_K: Tensor
    """Indices of the scores in flattened `[b, T - 1]`. With `score_N`, the shape is `[N]`."""
    shape: tuple[int, int]
    """Shape `(b, T - 1)` of the scores of all tokens."""
    unfiltered: bool = False
    """Whether to score with the sampling temperature but without top-k and top-p."""
    top_k: TopK | None = None
    """If set, return the largest logits of each position with their ids, instead of scores of targets."""
    real_tokens: Tensor | None = None
    """`[b, T]` bool with the shape of `input_ids`, False on padding. If None, all tokens are real."""
    score_N: Tensor | None = None
    """`[N]` int64, the index of the score for each position of `[b, T - 1]`, if several rows share scored tokens. If
    None, each score has one position."""
    routed_experts: Tensor | None = None
    """`[b, T, L, k]` in the layout of `input_ids`, the experts that the engine chose in each of L layers, -1 if not
    reported. None if no token has experts. Backends replay them if `policy.router_replay` is enabled."""

    @property
    def further_names(self) -> list[str]:
        """Names of the arguments from `row_inputs` in `model_inputs` that have no token axis."""
        return [name for name in self.model_inputs if name not in TOKEN_ARGUMENTS]

    def scatter(self, values_K: Tensor) -> Tensor:
        """Put per-token values, with their gradients, at their positions in `[b, T - 1]`. All other positions are 0.

        Args:
            values_K: `[K]`, or `[K, k]` for `[b, T - 1, k]`.
        """
        num_rows, width = self.shape
        values_N = values_K if self.score_N is None else spread(values_K, self.score_N)
        flat = values_N.new_zeros((num_rows * width, *values_N.shape[1:])).index_copy(0, self.places_K, values_N)
        return flat.view(num_rows, width, *values_N.shape[1:])


def split_rows(data: BatchedDataDict[Any], sizes: Sequence[int]) -> Iterator[BatchedDataDict[Any]]:
    """Cut a batch into consecutive microbatches of the given sizes."""
    start = 0
    for size in sizes:
        yield data.slice(start, start + size)
        start += size


def training_targets(rows: BatchedDataDict[Any]) -> Tensor:
    """Return a `[b, T - 1]` bool mask of the successors that a loss may count, by `token_mask` and `sample_mask`."""
    return (rows["token_mask"][:, 1:] > 0) & (rows["sample_mask"][:, None] > 0)


def all_targets(rows: BatchedDataDict[Any]) -> Tensor:
    """Return a `[b, T - 1]` bool mask of the real tokens with a predecessor."""
    index = torch.arange(1, rows["input_ids"].shape[1])
    return index[None, :] < rows["input_lengths"][:, None]


def build_model_inputs(
    rows: BatchedDataDict[Any], wanted: Tensor, layout: InputLayout, device: torch.device
) -> ModelInputs:
    """Lay out the rows of one microbatch.

    Args:
        rows: `input_ids [b, T]` right padded and `input_lengths [b]`, on the CPU.
        wanted: `[b, T - 1]` bool; entry t requests the score of token t + 1.
    """
    input_ids = rows["input_ids"]
    num_rows, width = input_ids.shape
    wanted = wanted & (torch.arange(1, width)[None, :] < rows["input_lengths"][:, None])
    row_K, column_K = wanted.nonzero(as_tuple=True)
    targets_K = input_ids[row_K, column_K + 1]
    places_K = row_K * (width - 1) + column_K
    return _scored_at(row_K, column_K, targets_K, places_K, (num_rows, width - 1), rows, layout, device)


def build_training_inputs(rows: BatchedDataDict[Any], layout: InputLayout, device: torch.device) -> ModelInputs:
    """Lay out the rows for scores of the targets that a loss may count (`build_model_inputs`)."""
    return build_model_inputs(rows, training_targets(rows), layout, device)


def build_distillation_inputs(rows: BatchedDataDict[Any], layout: InputLayout, device: torch.device) -> ModelInputs:
    """Lay out the rows for scores of the teacher's top-k tokens, under the softmax over all tokens.

    Args:
        rows: Keys of a training batch, and `teacher_topk_indices [b, T, k]`. Position t belongs to the distribution
            after token t.
    """
    return _with_several_targets(rows, rows["teacher_topk_indices"], layout, device)


def build_candidate_inputs(rows: BatchedDataDict[Any], layout: InputLayout, device: torch.device) -> ModelInputs:
    """Lay out the rows for scores of the candidates of all teachers, as `build_distillation_inputs` does."""
    return _with_several_targets(rows, candidates_of(rows), layout, device)


def _with_several_targets(
    rows: BatchedDataDict[Any], targets: Tensor, layout: InputLayout, device: torch.device
) -> ModelInputs:
    """Lay out the rows for scores of several tokens at each position."""
    inputs = _each_place(build_training_inputs(rows, layout, device))  # the targets of shared tokens differ by row
    num_rows, width = inputs.shape
    indices = to_device(targets[:, :width], device)
    targets_Kk = indices.reshape(num_rows * width, -1).index_select(0, inputs.places_K).long()
    return replace(inputs, targets_K=targets_Kk, unfiltered=True)


def build_score_inputs(rows: BatchedDataDict[Any], layout: InputLayout, device: torch.device) -> ModelInputs:
    """Lay out the rows of a microbatch for scores of whole rows. K = b, and the scored positions are the last tokens.

    Args:
        rows: `input_ids [b, T]` right padded and `input_lengths [b]`, on the CPU.
    """
    last_B = rows["input_lengths"] - 1
    row_B = torch.arange(len(last_B))
    targets_B = rows["input_ids"][row_B, last_B]
    return _scored_at(row_B, last_B, targets_B, row_B, (len(last_B), 1), rows, layout, device)


def build_topk_inputs(rows: BatchedDataDict[Any], top: TopK, layout: InputLayout, device: torch.device) -> ModelInputs:
    """Lay out the rows for the largest logits after every token, as selected by `top`."""
    return replace(build_position_inputs(rows, layout, device), top_k=top)


def build_position_inputs(rows: BatchedDataDict[Any], layout: InputLayout, device: torch.device) -> ModelInputs:
    """Lay out the rows of a microbatch for the model's outputs after every real token, including the last.

    Args:
        rows: `input_ids [b, T]` right padded and `input_lengths [b]`, on the CPU.

    Returns:
        Inputs of `shape` `(b, T)`. Position t belongs to the model's output after token t.
    """
    input_ids, lengths = rows["input_ids"], rows["input_lengths"]
    num_rows, width = input_ids.shape
    row_K, column_K = (torch.arange(width)[None, :] < lengths[:, None]).nonzero(as_tuple=True)
    targets_K, places_K = input_ids[row_K, column_K], row_K * width + column_K
    return _scored_at(row_K, column_K, targets_K, places_K, (num_rows, width), rows, layout, device)


def build_given_inputs(rows: BatchedDataDict[Any], layout: InputLayout, device: torch.device) -> ModelInputs:
    """Lay out the rows for scores of given tokens after every real token, at the sampling temperature.

    Args:
        rows: `input_ids [b, T]` right padded, `input_lengths [b]`, and `target_tokens [b, T, k]`, on the CPU. Position
            t of the targets belongs to the distribution after token t.
    """
    inputs = build_position_inputs(rows, layout, device)
    targets = to_device(rows["target_tokens"], device).flatten(0, 1)
    return replace(inputs, targets_K=targets.index_select(0, inputs.places_K), unfiltered=True)


def _scored_at(
    row_K: Tensor,
    column_K: Tensor,
    targets_K: Tensor,
    places_K: Tensor,
    shape: tuple[int, int],
    rows: BatchedDataDict[Any],
    layout: InputLayout,
    device: torch.device,
) -> ModelInputs:
    """Lay out rows for scores of the tokens at the given rows and columns (`ModelInputs`)."""
    model_inputs, places, real = _lay_out(rows, layout)
    experts = None
    if ROUTED_EXPERTS in rows:
        lengths, width = rows["input_lengths"].tolist(), model_inputs["input_ids"].shape
        experts = laid_out(rows[ROUTED_EXPERTS], lengths, places, tuple(width))
    positions_K, score_N = places(row_K, column_K), None
    if SHARED_PREFIXES in rows:
        positions_K, targets_K, score_N = _scored_once(positions_K, targets_K)
    return ModelInputs(
        model_inputs=_on(device, model_inputs),
        positions_K=to_device(positions_K, device),
        targets_K=to_device(targets_K, device),
        places_K=to_device(places_K, device),
        shape=shape,
        real_tokens=to_device(real, device),
        score_N=None if score_N is None else to_device(score_N, device),
        routed_experts=None if experts is None else to_device(experts, device),
    )


def _scored_once(positions_N: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return distinct positions, their targets, and the index of each given position among them.

    A shared token has the same target in all of its rows. The index is None if all positions are distinct.
    """
    positions_K, score_N = positions_N.unique(return_inverse=True)
    if len(positions_K) == len(positions_N):
        return positions_N, targets_N, None
    return positions_K, targets_N.new_empty(len(positions_K)).index_copy_(0, score_N, targets_N), score_N


def _each_place(inputs: ModelInputs) -> ModelInputs:
    """Return inputs with a separate score for each position."""
    if inputs.score_N is None:
        return inputs
    positions_K, targets_K = (each.index_select(0, inputs.score_N) for each in (inputs.positions_K, inputs.targets_K))
    return replace(inputs, positions_K=positions_K, targets_K=targets_K, score_N=None)


def with_positions(inputs: ModelInputs) -> ModelInputs:
    """Add explicit positions, for a model that gets only parts of rows."""
    ids = inputs.model_inputs["input_ids"]
    if "position_ids" in inputs.model_inputs:
        return inputs
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return replace(inputs, model_inputs=inputs.model_inputs | {"position_ids": positions})


def packed_model_inputs(segments: list[Tensor]) -> dict[str, Any]:
    """Concatenate 1-D token tensors and return them as the model's keyword arguments.

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
    """Return the model's arguments, the function that locates tokens, and a mask of the real tokens."""
    num_real = len(rows["input_ids"])
    rows = _with_image(rows)
    input_ids, lengths = rows["input_ids"], rows["input_lengths"].tolist()
    if layout.packed and SHARED_PREFIXES in rows and rows[SHARED_PREFIXES][:, 1].any():
        shared = share_prefixes(input_ids, lengths, prefixes_of(rows[SHARED_PREFIXES]), layout.round_to)
        model_inputs, ends = shared.model_inputs, torch.tensor([shared.num_tokens])
        places: Places = shared.places
    elif layout.packed:
        model_inputs = _packed(input_ids, lengths, layout.round_to)
        places, ends = _from(torch.tensor([0, *lengths[:-1]]).cumsum(0)), torch.tensor([sum(lengths[:num_real])])
    else:
        model_inputs = _padded(input_ids, lengths, layout.round_to)
        starts = torch.arange(len(lengths)) * model_inputs["input_ids"].shape[1]
        places, ends = _from(starts), torch.tensor([*lengths[:num_real], *[0] * (len(lengths) - num_real)])
    if ROW_INPUTS in rows:
        shares = "divided_row" in model_inputs
        model_inputs |= _further_inputs(rows, layout, model_inputs["input_ids"].shape[1], places if shares else None)
    return model_inputs, places, torch.arange(model_inputs["input_ids"].shape[1])[None, :] < ends[:, None]


def _with_image(rows: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """Add a row with a blank image to rows of a model that reads images if none of them has an image.

    Ranks gather the weights of the modules that read images in every pass, so all ranks must call them. The added row
    is packed or padded like the others, sees none of them and is not scored, so its gradient is 0.
    """
    if ROW_INPUTS not in rows or not lacks_images(rows[ROW_INPUTS]):
        return rows
    ids, inputs = rows[ROW_INPUTS][0].images.blank_row()
    input_ids = rows["input_ids"]
    width = max(len(ids), input_ids.shape[1])
    padded = [torch.nn.functional.pad(row, (0, width - row.shape[-1])) for row in (input_ids, ids[None])]
    lengths = torch.cat([rows["input_lengths"], torch.tensor([len(ids)])])
    added = {"input_ids": torch.cat(padded), "input_lengths": lengths, ROW_INPUTS: [*rows[ROW_INPUTS], inputs]}
    if SHARED_PREFIXES in rows:
        last = torch.tensor([[int(rows[SHARED_PREFIXES][:, 0].max()) + 1, 0]])
        added[SHARED_PREFIXES] = torch.cat([rows[SHARED_PREFIXES], last])
    return BatchedDataDict(rows.data | added)


def _further_inputs(
    rows: BatchedDataDict[Any], layout: InputLayout, width: int, places: Places | None
) -> dict[str, Tensor]:
    """Return the arguments from `row_inputs`, with positions if a row has its own position rule.

    Args:
        width: number of tokens of a padded row, or of the packed row.
        places: the function that locates tokens if rows share them.
    """
    column = rows[ROW_INPUTS]
    ids = [row[:length] for row, length in zip(rows["input_ids"], rows["input_lengths"].tolist(), strict=True)]
    for tokens, inputs in zip(ids, column, strict=True):
        inputs.require(tokens)
    if places is not None:
        located = [places(torch.full((len(own),), row), torch.arange(len(own))) for row, own in enumerate(ids)]
        arguments = forward_arguments(shared_images(ids, column, located))
        return arguments | {"position_ids": shared_position_ids(ids, column, located, width)}
    arguments = forward_arguments(column)
    if has_position_rule(column):
        arguments["position_ids"] = position_ids(ids, column, width, "packed" if layout.packed else "right")
    return arguments


def _from(starts_B: Tensor) -> Places:
    """Return the locations of tokens of rows that are stored contiguously from the given starts."""
    return lambda row_K, column_K: starts_B[row_K] + column_K


def _on(device: torch.device, model_inputs: dict[str, Any]) -> dict[str, Any]:
    sent = {key: to_device(value, device) for key, value in model_inputs.items() if isinstance(value, Tensor)}
    return model_inputs | sent


def _padded(input_ids: Tensor, lengths: Sequence[int], round_to: int) -> dict[str, Any]:
    """Trim rows to the longest one, rounded up. Columns beyond the data have token 0."""
    longest = round_up(max(lengths), round_to)
    trimmed = input_ids[:, :longest]
    missing = longest - trimmed.shape[1]
    return {"input_ids": torch.nn.functional.pad(trimmed, (0, missing))}


def _packed(input_ids: Tensor, lengths: Sequence[int], round_to: int) -> dict[str, Any]:
    """Concatenate rows. Tokens added by rounding form a separate segment that no row attends to."""
    segments = [row[:length] for row, length in zip(input_ids, lengths, strict=True)]
    filler = round_up(sum(lengths), round_to) - sum(lengths)
    if filler:
        segments.append(torch.zeros(filler, dtype=input_ids.dtype))
    return packed_model_inputs(segments)


def round_up(number: int, multiple: int) -> int:
    """Round a number up to a multiple."""
    return -(-number // multiple) * multiple
