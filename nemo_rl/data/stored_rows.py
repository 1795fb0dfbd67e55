"""Rows of a training batch whose tokens stay in Ray's object store until a rank needs them.

    runner actor ─► pack_rows ─► object store ─────────────────────────────► rank: with_tokens ─► [b, T] tensors
         └────────► lengths, rewards ─► driver: a batch with `STORED_ROWS` ─────┘

Log-probabilities that ranks compute stay in the object store too, and the batch has lists of `StoredScores`. The driver
plans with lengths only. Invariant: `with_tokens` makes the tensors that the driver would have made, bit for
bit, so nothing after it knows where tokens were.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_rl.data.common_prefixes import Path, Prefixes
from nemo_rl.data.routed_experts import ROUTED_EXPERTS, Experts, joined_experts, padded_experts
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.errors import DeadlineExceededError

if TYPE_CHECKING:
    import ray

STORED_ROWS = "stored_rows"
"""Key of a batch: a list of B `StoredRow`s, in place of the tensors that `TOKEN_KEYS` names."""
NUM_WRITTEN = "num_written_tokens"
"""Key of such a batch: `[B]` int64, tokens that the policy wrote."""
SAMPLE_ADVANTAGES = "sample_advantages"
"""Key of such a batch: `[B]` float32, the advantage of all counted tokens of a row; absent before the credit stage."""
NUM_STALE = "num_stale_tokens"
"""Key of such a batch: `[B]` int64, position after the last token that older weights wrote; absent if there are none.
Weights only become newer, so the tokens that the policy wrote before it are all stale."""
SCORE_KEYS = ("prev_logprobs", "reference_policy_logprobs")
"""Keys that have a list of B `StoredScores` in such a batch, or None for a row whose scores are the engine's."""
TOKEN_KEYS = ("input_ids", "token_mask", "generation_logprobs", "advantages")
FETCH_S = 600.0
"""Seconds to get the rows of a rank from the object store."""


@dataclass(frozen=True)
class PackedRows:
    """The tokens of some rows, end to end."""

    ends: list[int]
    """End of each row."""
    token_ids: NDArray[np.int32]
    """`[N]` int32."""
    is_written: NDArray[np.bool_]
    """`[N]` bool, tokens that the policy wrote."""
    logprobs: NDArray[np.float32]
    """`[N]` float32, the engine's log-probabilities; 0 where `is_written` is false."""
    texts: NDArray[np.uint8]
    """`[M]` uint8, a pickle of each row's messages without tokens, end to end; ranks do not read them."""
    text_ends: list[int]
    """End of each row's pickle."""
    experts: Experts | None = None
    """`[N, L, k]` as the key `routed_experts` of a batch; None if no engine reported experts."""

    def start_of(self, index: int) -> int:
        """Return the position of the first token of a row."""
        return self.ends[index - 1] if index else 0

    def messages_of(self, index: int) -> list[Any]:
        """Return the messages of a row without tokens: `role` and `content`."""
        start = self.text_ends[index - 1] if index else 0
        messages: list[Any] = pickle.loads(self.texts[start : self.text_ends[index]])
        return messages


@dataclass(frozen=True)
class StoredScores:
    """Log-probabilities of a row in the object store."""

    scores: "ray.ObjectRef[NDArray[np.float32]]"
    """Reference of `[N]` float32, the scores of some rows end to end."""
    start: int
    """Position of the row's first token there."""


@dataclass(frozen=True)
class StoredRow:
    """A row in the object store."""

    rows: "ray.ObjectRef[PackedRows]"
    """Reference of its `PackedRows`."""
    index: int
    """Its place there."""
    width: int
    """Tokens of the longest row of the whole batch, T."""
    pad_token_id: int
    """Id written after the end of the row."""
    path: Path
    """Place of the row in the tree of the rows there."""

    @staticmethod
    def pack_list(rows: "Sequence[StoredRow]") -> "_Columns":
        """Return what `tensor_transport.pack_tensors` pickles in place of a list of rows, and unpickles as the list."""
        return _Columns(rows)


class _Columns:
    """Rows as one list for each attribute, so that a reference that rows share is pickled once."""

    def __init__(self, rows: Sequence[StoredRow]) -> None:
        numbers: dict[Any, int] = {}
        of_rows = [numbers.setdefault(row.rows, len(numbers)) for row in rows]
        self._columns = (
            list(numbers),
            of_rows,
            [row.index for row in rows],
            [row.width for row in rows],
            [row.pad_token_id for row in rows],
            [row.path.place for row in rows],
            [row.path.nodes for row in rows],
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rows_of_columns, self._columns


def _rows_of_columns(references: Sequence[Any], numbers: Sequence[int], *columns: Sequence[Any]) -> list[StoredRow]:
    return [
        StoredRow(references[number], index, width, pad_token_id, Path(place, nodes))
        for number, index, width, pad_token_id, place, nodes in zip(numbers, *columns, strict=True)
    ]


def pack_rows(message_logs: Sequence[Sequence[Any]]) -> PackedRows:
    """Pack the messages of some rows, each with `token_ids` and, if the policy wrote it, `generation_logprobs`."""
    messages = [message for log in message_logs for message in log]
    lengths = [message["token_ids"].numel() for message in messages]
    written = [message.get("generation_logprobs") for message in messages]
    zeros = [torch.zeros(length) if each is None else each for each, length in zip(written, lengths, strict=True)]
    texts = [pickle.dumps([{"role": each["role"], "content": each["content"]} for each in log]) for log in message_logs]
    return PackedRows(
        np.cumsum([sum(message["token_ids"].numel() for message in log) for log in message_logs]).tolist(),
        torch.cat([message["token_ids"] for message in messages]).numpy().astype(np.int32),
        np.repeat([each is not None for each in written], lengths),
        torch.cat(zeros).numpy(),
        np.frombuffer(b"".join(texts), dtype=np.uint8),
        np.cumsum([len(text) for text in texts]).tolist(),
        joined_experts(messages),
    )


def paths_of(packed: PackedRows, groups: Sequence[int] | None = None) -> list[Path]:
    """Return what each row shares with others of its prompt in `groups`, or with all if `groups` is None."""
    bounds = zip([0, *packed.ends], packed.ends, strict=False)
    tokens = [packed.token_ids[start:end] for start, end in bounds]
    return Prefixes.of_groups(tokens, groups or [0] * len(tokens)).paths()


def with_tokens(batch: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """Get the tokens of a batch of stored rows, or return any other batch unchanged.

    A row whose `input_lengths` is smaller than its number of stored tokens is cut: filler rows have one token.

    Returns:
        The batch with `input_ids` `[b, T]` int64, `token_mask` and `generation_logprobs` `[b, T]` float32 and, after
        their stages, `advantages`, `prev_logprobs` and `reference_policy_logprobs` `[b, T]` float32. Rows with
        experts add `routed_experts` `[b, T, L, k]`.

    Raises:
        DeadlineExceededError: the object store does not give the rows within `FETCH_S`.
        ray.exceptions.ObjectLostError: the node that held the rows was lost.
    """
    if STORED_ROWS not in batch:
        return batch
    stored: list[StoredRow] = batch[STORED_ROWS]
    shape = (len(stored), stored[0].width)
    input_ids = np.full(shape, stored[0].pad_token_id, dtype=np.int64)
    token_mask = np.zeros(shape, dtype=np.float32)
    logprobs = np.zeros(shape, dtype=np.float32)
    packed = fetched([row.rows for row in stored])
    for row, (reference, length) in enumerate(zip(stored, batch["input_lengths"].tolist(), strict=True)):
        rows = packed[reference.rows]
        start = rows.start_of(reference.index)
        input_ids[row, :length] = rows.token_ids[start : start + length]
        token_mask[row, :length] = rows.is_written[start : start + length]
        logprobs[row, :length] = rows.logprobs[start : start + length]
    experts = [_experts_of(packed[row.rows], row.index) for row in stored]
    replaced = (STORED_ROWS, NUM_WRITTEN, NUM_STALE, SAMPLE_ADVANTAGES, *SCORE_KEYS)
    whole: BatchedDataDict[Any] = BatchedDataDict({key: batch[key] for key in batch if key not in replaced})
    whole["input_ids"] = torch.from_numpy(input_ids)
    whole["token_mask"] = torch.from_numpy(token_mask)
    whole["generation_logprobs"] = torch.from_numpy(logprobs)
    if (reported := padded_experts(experts, shape[1])) is not None:
        whole[ROUTED_EXPERTS] = reported
    for name in SCORE_KEYS:
        if name in batch:
            whole[name] = torch.from_numpy(_scores(batch[name], batch["input_lengths"].tolist(), logprobs))
    if SAMPLE_ADVANTAGES in batch:
        counted_BT = whole["token_mask"] * batch["sample_mask"][:, None]
        whole["advantages"] = torch.where(counted_BT != 0, batch[SAMPLE_ADVANTAGES][:, None], 0.0)
    return whole


def _experts_of(rows: PackedRows, index: int) -> Experts | None:
    return None if rows.experts is None else rows.experts[rows.start_of(index) : rows.ends[index]]


def _scores(
    stored: Sequence[StoredScores | None], lengths: Sequence[int], of_engines: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return the scores of rows `[b, T]`, or the engines' scores `of_engines` `[b, T]` where none are stored."""
    found = fetched([row.scores for row in stored if row is not None])
    scores = of_engines.copy()
    for row, (reference, length) in enumerate(zip(stored, lengths, strict=True)):
        if reference is not None:
            scores[row, :length] = found[reference.scores][reference.start : reference.start + length]
    return scores


def stale_of(batch: BatchedDataDict[Any]) -> Tensor | None:
    """Mark the tokens of stored rows that older weights wrote: `[b, T]` bool, where only written tokens have a meaning.

    None if the batch has no stale token.
    """
    if NUM_STALE not in batch:
        return None
    positions_T = torch.arange(batch[STORED_ROWS][0].width)
    return positions_T[None] < batch[NUM_STALE][:, None]


def fetched[T](references: "Sequence[ray.ObjectRef[T]]") -> "dict[ray.ObjectRef[T], T]":
    """Get objects from the object store by reference, and raise the errors of `with_tokens`."""
    if not references:
        return {}  # Ray need not run
    import ray  # deferred: ranks without a Ray of their own load this file

    wanted = list(dict.fromkeys(references))
    try:
        return dict(zip(wanted, ray.get(wanted, timeout=FETCH_S), strict=True))
    except ray.exceptions.GetTimeoutError as error:
        raise DeadlineExceededError(
            f"{len(wanted)} groups of answers did not arrive from the object store within {FETCH_S:g} s."
        ) from error
