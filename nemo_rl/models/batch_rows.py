"""Provide the rows of a batch, whose tokens are in the batch or in Ray's object store.

    in the batch   [B, T] tensors ──────────────────────────────────────────────► rank
    stored         runner actor ─► pack_rows ─► object store ───────────────────► rank: whole ─► [b, T] tensors
                        └────────► lengths, rewards ─► driver: `STORED_ROWS` ───────┘

The driver plans with lengths. Log-probabilities that ranks compute for stored rows also stay in the object store. Only
this module and `experience.runners.stored`, which makes stored rows, know the columns of stored rows. All other code
uses `BatchRows.of`. Invariant: both kinds of rows give the same results, and `whole` makes the tensors that the driver
would have made, bit for bit.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, override

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_rl.data.common_prefixes import Path, Prefixes
from nemo_rl.data.model_rows import ROW_INPUTS, RowInputs
from nemo_rl.data.packing import PROMPT_GROUPS, Patches
from nemo_rl.data.routed_experts import ROUTED_EXPERTS, Experts, joined_experts, padded_experts
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.divergence import sequence_errors
from nemo_rl.utils.errors import DeadlineExceededError

if TYPE_CHECKING:
    import ray

    from nemo_rl.models.policy.interfaces import ScoringModel

STORED_ROWS = "stored_rows"
"""Key of a batch: a list of B `StoredRow`s, in place of the tensors that `StoredRows.STORED` names."""
NUM_WRITTEN = "num_written_tokens"
"""Key of a batch of stored rows: `[B]` int64, number of tokens that the policy wrote."""
_NUM_STALE = "num_stale_tokens"
"""Key of a batch of stored rows during scoring: the argument `num_stale_B` of `BatchRows.score`."""
SCORE_KEYS = ("prev_logprobs", "reference_policy_logprobs")
"""Keys of lists of B `StoredScores` in a batch of stored rows. An entry is None for a row with the engine's scores."""
FETCH_S = 600.0
"""Time limit in seconds for fetching the rows of a rank from the object store."""
_NUM_COMPARED = 64
"""Number of stored rows that are fetched for a comparison of policy and engines."""


@dataclass(frozen=True)
class PackedRows:
    """The tokens of some rows, concatenated."""

    ends: list[int]
    """Position after the last token of each row."""
    token_ids: NDArray[np.int32]
    """`[N]` int32."""
    is_written: NDArray[np.bool_]
    """`[N]` bool, tokens that the policy wrote."""
    logprobs: NDArray[np.float32]
    """`[N]` float32, the engine's log-probabilities. 0 where `is_written` is false."""
    texts: NDArray[np.uint8]
    """`[M]` uint8, the concatenated pickles of each row's messages without tokens. Ranks do not read this field."""
    text_ends: list[int]
    """Position after each row's pickle."""
    experts: Experts | None = None
    """`[N, L, k]`, in the form of the key `routed_experts` of a batch. None if no engine reported experts."""

    def start_of(self, index: int) -> int:
        """Return the position of the first token of a row."""
        return self.ends[index - 1] if index else 0

    def messages_of(self, index: int) -> list[Any]:
        """Return the messages of a row without tokens: `role` and `content`."""
        start = self.text_ends[index - 1] if index else 0
        messages: list[Any] = pickle.loads(self.texts[start : self.text_ends[index]])
        return messages

    def experts_of(self, index: int) -> Experts | None:
        """Return the experts of a row, or None if there are none."""
        return None if self.experts is None else self.experts[self.start_of(index) : self.ends[index]]


@dataclass(frozen=True)
class StoredScores:
    """Log-probabilities of a row in the object store."""

    scores: "ray.ObjectRef[NDArray[np.float32]]"
    """Reference of `[N]` float32, the concatenated scores of some rows."""
    start: int
    """Position of the row's first token in the concatenated scores."""


@dataclass(frozen=True)
class StoredRow:
    """A row in the object store."""

    rows: "ray.ObjectRef[PackedRows]"
    """Reference of the `PackedRows` that contain the row."""
    index: int
    """Index of the row in these `PackedRows`."""
    width: int
    """Number of tokens of the longest row of the whole batch, T."""
    pad_token_id: int
    """Id written after the end of the row."""
    path: Path
    """Position of the row in the tree of shared prefixes of these rows."""

    @staticmethod
    def pack_list(rows: "Sequence[StoredRow]") -> "_Columns":
        """Return the object that `tensor_transport.pack_tensors` pickles for a list of rows. It unpickles as a list."""
        return _Columns(rows)


class _Columns:
    """Rows as one list per attribute, so that a reference that several rows share is pickled once."""

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
    """Pack the messages of some rows. Messages have `token_ids`, and `generation_logprobs` if the policy wrote them."""
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
    """Return the prefixes that each row shares with rows of its prompt in `groups`. If None, with all rows."""
    bounds = zip([0, *packed.ends], packed.ends, strict=False)
    tokens = [packed.token_ids[start:end] for start, end in bounds]
    return Prefixes.of_groups(tokens, groups or [0] * len(tokens)).paths()


def fetched[T](references: "Sequence[ray.ObjectRef[T]]") -> "dict[ray.ObjectRef[T], T]":
    """Get objects from the object store, by reference.

    Raises:
        DeadlineExceededError: the object store does not give the objects within `FETCH_S`.
        ray.exceptions.ObjectLostError: the node that held an object was lost.
    """
    if not references:
        return {}  # Ray may not be running
    import ray  # deferred: ranks without Ray import this file

    wanted = list(dict.fromkeys(references))
    try:
        return dict(zip(wanted, ray.get(wanted, timeout=FETCH_S), strict=True))
    except ray.exceptions.GetTimeoutError as error:
        raise DeadlineExceededError(
            f"{len(wanted)} groups of answers did not arrive from the object store within {FETCH_S:g} s."
        ) from error


class Kept(NamedTuple):
    """Stored scores of the b rows of a rank."""

    scores: "ray.ObjectRef[Any]"
    """Reference of `[N]` float32, the concatenated scores."""
    starts: list[int]
    """Position of the first token of each row in the scores."""
    errors_B: Tensor
    """`[b]` float32, `sequence_errors` of the rows."""


@dataclass(frozen=True)
class BatchRows:
    """Rows whose tokens are in the batch."""

    batch: BatchedDataDict[Any]
    """B rows, the longest of T tokens. Scores and advantages are written into it."""

    SCORED: ClassVar[tuple[str, ...]] = ("input_ids", "input_lengths", PROMPT_GROUPS, ROW_INPUTS)
    """Columns that a model needs to score rows."""
    STORED: ClassVar[tuple[str, ...]] = ()
    """Columns that `whole` adds to the batch."""

    @staticmethod
    def of(batch: BatchedDataDict[Any]) -> "BatchRows":
        """Return the rows of a batch."""
        return StoredRows(batch) if STORED_ROWS in batch else BatchRows(batch)

    def whole(self) -> BatchedDataDict[Any]:
        """Return the batch with the tokens of its rows.

        A stored row whose `input_lengths` is smaller than its number of stored tokens is cut. Filler rows have one
        token.

        Returns:
            The batch with `input_ids` `[B, T]` int64, `token_mask` and `generation_logprobs` `[B, T]` float32 and,
            after their stages, `advantages`, `prev_logprobs` and `reference_policy_logprobs` `[B, T]` float32. Rows
            with experts have `routed_experts` `[B, T, L, k]`.

        Raises:
            DeadlineExceededError, ray.exceptions.ObjectLostError: raised by `fetched`.
        """
        return self.batch

    def to_compare(self) -> BatchedDataDict[Any]:
        """Return the rows that are compared, with their tokens: all rows, or the first few stored rows."""
        return self.batch

    def prefixes(self) -> Prefixes:
        """Find the prefixes that rows share with all rows or, if the batch has `PROMPT_GROUPS`, within their prompt.

        Stored rows share prefixes only with rows of the same object. Rows with images share the tokens of equal images.
        Rows with other inputs (`data.model_rows`) share no prefixes, because the model expects the inputs of each row.
        """
        batch, lengths = self.batch, self.batch["input_lengths"].tolist()
        tokens = [ids[:length] for ids, length in zip(batch["input_ids"].numpy(), lengths, strict=True)]
        if ROW_INPUTS in batch:
            column: list[RowInputs] = batch[ROW_INPUTS]
            if any(inputs.images is None for inputs in column):
                return Prefixes.alone(len(lengths))
            pairs = zip(tokens, column, strict=True)
            tokens = [np.array(inputs.images.named_tokens(ids.tolist())) for ids, inputs in pairs if inputs.images]
        groups = batch.get(PROMPT_GROUPS)
        found = Prefixes.of(tokens) if groups is None else Prefixes.of_groups(tokens, groups.tolist())
        return found if ROW_INPUTS not in batch else _around_images(found, tokens)

    def patches(self) -> Patches | None:
        """Return the patches of the rows' images, or None if no row may have images."""
        if ROW_INPUTS not in self.batch:
            return None
        lengths = self.batch["input_lengths"].tolist()
        rows = zip(self.batch["input_ids"], lengths, self.batch[ROW_INPUTS], strict=True)
        return Patches([row.images.patches(ids[:n].tolist()) if row.images else [] for ids, n, row in rows])

    def num_written(self) -> Tensor:
        """Return the number of tokens per row that the policy wrote and a model predicts, `[B]`."""
        return self.batch["token_mask"][:, 1:].sum(1, dtype=torch.float64)

    def counted(self) -> Tensor:
        """Return which rows have a token that counts in the loss, `[B]` bool."""
        return (self.num_written() > 0) & (self.batch["sample_mask"] != 0)

    def advantage_mask(self) -> Tensor:
        """Return a float32 mask of advantages that count: `[B, T]`, or `[B, 1]` if each row has only one advantage."""
        return self.batch["token_mask"] * self.batch["sample_mask"][:, None]

    def advantage_counts(self) -> Tensor | None:
        """Return the number of tokens that share an advantage, `[B]`, or None if each token has its own."""
        return None

    def score(self, policy: "ScoringModel", num_stale_B: Tensor | None = None) -> Tensor:
        """Write `prev_logprobs`. Stale tokens get the engine's log-probabilities.

        The policy scores no rows if all tokens are stale.

        Args:
            policy: Policy that scores the rows.
            num_stale_B: `StepBatch.num_stale_B`. If None, no token is stale.

        Returns:
            `sequence_errors` `[B]` float32.
        """
        batch = self.batch
        if num_stale_B is not None and not (batch["token_mask"] * ~stale_tokens(batch, num_stale_B)).any():
            scores_BT = batch["generation_logprobs"]
        else:
            scores_BT = policy.get_logprobs(batch)["logprobs"]
        batch["prev_logprobs"] = _of_samplers(batch, scores_BT, num_stale_B)
        return _errors(batch, batch["prev_logprobs"])

    def score_reference(self, policy: "ScoringModel") -> None:
        """Write `reference_policy_logprobs`."""
        scores = policy.get_reference_policy_logprobs(self.batch)
        self.batch["reference_policy_logprobs"] = scores["reference_logprobs"]


def _around_images(prefixes: Prefixes, tokens: Sequence[NDArray[np.int64]]) -> Prefixes:
    """Return the tree in which no common prefix ends within the tokens of an image, which have negative numbers."""

    def outside(row: int, count: int) -> int:
        own = tokens[row]
        while 0 < count < len(own) and own[count] < 0 and own[count] == own[count - 1]:
            count -= 1
        return count

    shared = [outside(row, count) for row, count in zip(prefixes.rows, prefixes.shared, strict=True)]
    return Prefixes(prefixes.rows, shared)


class StoredRows(BatchRows):
    """Rows whose tokens and log-probabilities stay in the object store until a rank needs them.

    The driver has only lengths and counts, and one advantage for all tokens of a row: `advantages` is `[B, 1]`.
    """

    SCORED: ClassVar[tuple[str, ...]] = (
        "input_lengths",
        "sample_mask",
        STORED_ROWS,
        _NUM_STALE,
        PROMPT_GROUPS,
        ROW_INPUTS,
    )
    STORED: ClassVar[tuple[str, ...]] = ("input_ids", "token_mask", "generation_logprobs", "advantages")

    @override
    def whole(self) -> BatchedDataDict[Any]:
        batch, lengths = self.batch, self.batch["input_lengths"].tolist()
        stored: list[StoredRow] = batch[STORED_ROWS]
        shape = (len(stored), stored[0].width)
        input_ids = np.full(shape, stored[0].pad_token_id, dtype=np.int64)
        token_mask = np.zeros(shape, dtype=np.float32)
        logprobs = np.zeros(shape, dtype=np.float32)
        packed = fetched([row.rows for row in stored])
        for row, (reference, length) in enumerate(zip(stored, lengths, strict=True)):
            rows = packed[reference.rows]
            start = rows.start_of(reference.index)
            input_ids[row, :length] = rows.token_ids[start : start + length]
            token_mask[row, :length] = rows.is_written[start : start + length]
            logprobs[row, :length] = rows.logprobs[start : start + length]
        replaced = (STORED_ROWS, NUM_WRITTEN, _NUM_STALE, "advantages", *SCORE_KEYS)
        whole: BatchedDataDict[Any] = BatchedDataDict({key: batch[key] for key in batch if key not in replaced})
        whole["input_ids"] = torch.from_numpy(input_ids)
        whole["token_mask"] = torch.from_numpy(token_mask)
        whole["generation_logprobs"] = torch.from_numpy(logprobs)
        experts = [packed[row.rows].experts_of(row.index) for row in stored]
        if (reported := padded_experts(experts, shape[1])) is not None:
            whole[ROUTED_EXPERTS] = reported
        for name in SCORE_KEYS:
            if name in batch:
                whole[name] = torch.from_numpy(_fetched_scores(batch[name], lengths, logprobs))
        if "advantages" in batch:
            mask_BT = BatchRows(whole).advantage_mask()
            whole["advantages"] = torch.where(mask_BT != 0, batch["advantages"], 0.0)
        return whole

    @override
    def to_compare(self) -> BatchedDataDict[Any]:
        return StoredRows(self.batch.slice(0, _NUM_COMPARED)).whole()

    @override
    def prefixes(self) -> Prefixes:
        # # A row that was cut shares no prefix, because its path is that of the whole row.
        lengths = self.batch["input_lengths"].tolist()
        if ROW_INPUTS in self.batch:  # paths do not tell images apart
            return Prefixes.alone(len(lengths))
        groups = self.batch[PROMPT_GROUPS].tolist() if PROMPT_GROUPS in self.batch else [0] * len(lengths)
        numbers: dict[Any, int] = {}
        paths: list[tuple[int, Path]] = []
        for row, length, group in zip(self.batch[STORED_ROWS], lengths, groups, strict=True):
            whole = length > max((depth for depth, _ in row.path.nodes), default=0)
            number = numbers.setdefault((row.rows, group), len(numbers)) if whole else -1
            paths.append((number, row.path))
        order = sorted(range(len(paths)), key=lambda row: (paths[row][0], paths[row][1].place, row))
        shared = [0] * len(order)
        for place in range(1, len(order)):
            (before, path_before), (here, path) = (paths[order[place - 1]], paths[order[place]])
            if before == here >= 0:
                shared[place] = path_before.shared(path)
        return Prefixes(order, shared)

    @override
    def patches(self) -> Patches | None:
        # # The places of images are not needed, because stored rows with images share no tokens.
        if ROW_INPUTS not in self.batch:
            return None
        return Patches([[(0, row.images.num_patches)] if row.images else [] for row in self.batch[ROW_INPUTS]])

    @override
    def num_written(self) -> Tensor:
        return self.batch[NUM_WRITTEN]

    @override
    def advantage_mask(self) -> Tensor:
        return self.counted()[:, None] * self.batch["sample_mask"][:, None]

    @override
    def advantage_counts(self) -> Tensor | None:
        return self.num_written()

    @override
    def score(self, policy: "ScoringModel", num_stale_B: Tensor | None = None) -> Tensor:
        batch = self.batch
        if num_stale_B is not None and bool((num_stale_B >= batch["input_lengths"]).all()):
            batch["prev_logprobs"] = [None] * batch.size
            return self.counted().float()  # the ratio of equal log-probabilities is exp(0) = 1
        marked = batch if num_stale_B is None else BatchedDataDict({**batch, _NUM_STALE: num_stale_B})
        batch["prev_logprobs"], errors_B = policy.keep_logprobs(marked)
        return errors_B

    @override
    def score_reference(self, policy: "ScoringModel") -> None:
        self.batch["reference_policy_logprobs"], _ = policy.keep_logprobs(self.batch, of_reference=True)

    def keep(self, whole: BatchedDataDict[Any], scores_BT: Tensor) -> Kept:
        """Store the scores `[b, T]` of a rank's rows in the object store. Stale tokens get the engine's scores."""
        import ray  # deferred, as in `fetched`

        scores_BT = _of_samplers(whole, scores_BT, self.batch.get(_NUM_STALE))
        lengths = whole["input_lengths"].tolist()
        flat = np.concatenate([row[:length] for row, length in zip(scores_BT.numpy(), lengths, strict=True)])
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        return Kept(ray.put(flat), starts, _errors(whole, scores_BT))


def stale_tokens(rows: BatchedDataDict[Any], num_stale_B: Tensor) -> Tensor:
    """Return a `[B, T]` bool mask of the tokens of whole rows that older weights wrote."""
    has_begun_BT = rows["token_mask"].cumsum(1) > 0
    return has_begun_BT & (torch.arange(has_begun_BT.shape[1])[None] < num_stale_B[:, None])


def _of_samplers(rows: BatchedDataDict[Any], scores_BT: Tensor, num_stale_B: Tensor | None) -> Tensor:
    """Return the scores of whole rows. Stale tokens get the engine's log-probabilities."""
    if num_stale_B is None:
        return scores_BT
    return torch.where(stale_tokens(rows, num_stale_B), rows["generation_logprobs"], scores_BT)


def _errors(rows: BatchedDataDict[Any], scores_BT: Tensor) -> Tensor:
    """Return `sequence_errors` between the scores and the engine's log-probabilities for whole rows, `[B]`."""
    mask_BT = rows["token_mask"] * rows["sample_mask"][:, None]
    return sequence_errors(scores_BT[:, 1:], rows["generation_logprobs"][:, 1:], mask_BT[:, 1:])


def _fetched_scores(
    stored: Sequence[StoredScores | None], lengths: Sequence[int], of_engines: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return the stored scores of rows `[b, T]`. Rows without stored scores get the engines' log-probabilities."""
    found = fetched([row.scores for row in stored if row is not None])
    scores = of_engines.copy()
    for row, (reference, length) in enumerate(zip(stored, lengths, strict=True)):
        if reference is not None:
            scores[row, :length] = found[reference.scores][reference.start : reference.start + length]
    return scores
