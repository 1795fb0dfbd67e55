"""Decode rows with continuous batching: rows enter and leave between steps, and a cache holds their tokens.

    waiting ─► admitted: read whole ─┐
    active:  read their last token ──┴─► one pass ─► draws ─► finished rows leave, and free their room
       ▲                                               │
       └── the cache is full: the newest row waits ◄───┘

Rows that begin with the same tokens share their cached keys and values. Orca (Yu et al. 2022) describes the schedule,
and vLLM (Kwon et al. 2023, arXiv:2309.06180) the preemption of the newest row, whose tokens are later computed again.

`TokenCache` assigns each token of a row its own position in the key-value cache, so padding and blocks waste no memory.
If a new row begins like a running or ended row, it uses the same positions for the common tokens, and does not read
these tokens again. The places of ended rows are reused when no other place is free, beginning with the row that ended
first. Every rank of an engine has such a cache. Invariant: the same calls give the same places on all ranks.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, override

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_rl.host.device import to_device
from nemo_rl.models.attention import AttentionPlan, Piece
from nemo_rl.models.attention.cached_pass import CachedPass, KeysAndValues
from nemo_rl.models.generation.engine_load import EngineLoad
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.rows import RowsEngine, by_adapter
from nemo_rl.models.generation.stepped import Finished
from nemo_rl.utils.errors import GenerationError

MOST_ENDED = 256
"""Number of ended rows whose tokens stay in the cache. A new row is compared with each of them."""


class Cost(NamedTuple):
    """Numbers of tokens to read and of cache positions that a row needs when it enters."""

    num_new: int
    """Number of tokens that the row has to read."""
    room: int
    """Number of cache positions for the row that no running row holds yet."""


@dataclass
class _Held:
    """Tokens of a row and their cache positions. The first `num_read` have keys and values of the adapter."""

    tokens: NDArray[np.int32]
    places: NDArray[np.int64]
    num_read: int
    adapter: str | None = None


class TokenCache:
    """Positions of the tokens of rows in the cache.

    Args:
        num_places: Number of tokens that fit into the cache.

    Attributes:
        num_places: Number of tokens that fit into the cache.
        room: Number of positions that no running row holds.
    """

    def __init__(self, num_places: int, device: torch.device) -> None:
        self.num_places = self.room = num_places
        self._device = device
        self._free = np.arange(num_places)[::-1].copy()
        """The first `_num_free` entries are the positions that no row holds. The last of these is used next."""
        self._num_free = num_places
        self._holders, self._users = np.zeros((2, num_places), np.int32)
        """Number of rows that hold each position, and number of running rows that do."""
        self._running: dict[str, _Held] = {}
        self._ended: dict[str, _Held] = {}
        """Ended rows, starting with the row that ended or was last shared longest ago."""
        self._layers: dict[int, KeysAndValues] = {}

    @property
    def num_bytes(self) -> int:
        """The bytes of the keys and values of all layers that have been read."""
        return sum(part.nbytes for layer in self._layers.values() for part in layer)

    def cost(self, token_ids: Sequence[int], adapter: str | None = None) -> Cost:
        """Return the number of uncached tokens of a new row, and the number of positions that it would take."""
        other, length = self._longest_start(np.array(token_ids, np.int32), adapter)
        num_new = len(token_ids) - length
        unused = 0 if other is None else np.count_nonzero(self._users[self._held(other).places[:length]] == 0)
        return Cost(num_new, num_new + int(unused))

    def enter(self, row: str, token_ids: Sequence[int], adapter: str | None = None) -> int:
        """Assign positions to a new row's tokens. Return how many of them, without the last, need not be read.

        Args:
            row: Name of the row.
            token_ids: Its tokens.
            adapter: Name of the adapter that computes the row. Only rows of one adapter share keys and values.
        """
        tokens = np.array(token_ids, np.int32)
        other, length = self._longest_start(tokens, adapter)
        places = np.empty(0, np.int64) if other is None else self._held(other).places[:length]
        if other in self._ended:
            self._ended[other] = self._ended.pop(other)
        self.room -= int(np.count_nonzero(self._users[places] == 0))
        self._users[places] += 1
        self._holders[places] += 1
        self._running[row] = _Held(tokens[:length], places, length, adapter)
        self._extend(self._running[row], tokens[length:])
        return length

    def leave(self, rows: Iterable[str]) -> None:
        """Mark rows as ended. Their tokens stay in the cache until their positions are needed."""
        for row in rows:
            held = self._ended[row] = self._running.pop(row)
            self._users[held.places] -= 1
            self.room += int(np.count_nonzero(self._users[held.places] == 0))
        while len(self._ended) > MOST_ENDED:
            self._drop_oldest()

    def clear(self) -> None:
        """Remove all rows, because the weights have changed."""
        self.leave(list(self._running))
        while self._ended:
            self._drop_oldest()

    def release(self) -> None:
        """Free the memory if no row is running. The next pass allocates it again."""
        if not self._running:
            self.clear()
            self._layers.clear()

    def read(self, rows: Mapping[str, Sequence[int]]) -> CachedPass:
        """Append tokens to running rows, and describe the pass that reads all of their new tokens.

        Args:
            rows: Tokens to append to each row. A row that has just entered has no tokens to append.
        """
        for row, token_ids in rows.items():
            self._extend(self._running[row], np.array(token_ids, np.int32))
        held = [self._running[row] for row in rows]
        queries = list(pairwise(accumulate((len(one.places) - one.num_read for one in held), initial=0)))
        keys = list(pairwise(accumulate((len(one.places) for one in held), initial=0)))
        described = CachedPass(
            token_ids=self._on_device([one.tokens[one.num_read :] for one in held]),
            positions=self._on_device([np.arange(one.num_read, len(one.places)) for one in held]),
            new=self._on_device([one.places[one.num_read :] for one in held]),
            seen=self._on_device([one.places for one in held]),
            plan=AttentionPlan([Piece(*query, *key) for query, key in zip(queries, keys, strict=True)]),
            last=self._on_device([np.array([stop - 1 for _, stop in queries])]),
            num_places=self.num_places,
            layers=self._layers,
        )
        for one in held:
            one.num_read = len(one.places)
        return described

    def _held(self, row: str) -> _Held:
        return self._running[row] if row in self._running else self._ended[row]

    def _longest_start(self, tokens: NDArray[np.int32], adapter: str | None) -> tuple[str | None, int]:
        """Return the row that shares the most first tokens with `tokens`, and their number without the last token."""
        best, length, most = None, 0, len(tokens) - 1
        for row, held in chain(self._running.items(), self._ended.items()):
            if held.adapter != adapter:
                continue
            reach = min(most, len(held.tokens))
            if reach > length and np.array_equal(held.tokens[: length + 1], tokens[: length + 1]):
                differ = held.tokens[:reach] != tokens[:reach]
                best, length = row, int(differ.argmax()) if differ.any() else reach
        return best, length

    def _extend(self, held: _Held, tokens: NDArray[np.int32]) -> None:
        count = len(tokens)
        assert count <= self.room, f"{count} tokens do not fit into {self.room} places"
        while self._num_free < count:
            self._drop_oldest()
        self._num_free -= count
        self.room -= count
        places = self._free[self._num_free : self._num_free + count][::-1]
        self._users[places] = self._holders[places] = 1
        held.tokens, held.places = np.concatenate([held.tokens, tokens]), np.concatenate([held.places, places])

    def _drop_oldest(self) -> None:
        """Remove the row that ended or was last shared longest ago."""
        places = self._ended.pop(next(iter(self._ended))).places
        self._holders[places] -= 1
        freed = places[self._holders[places] == 0]
        self._free[self._num_free : self._num_free + len(freed)] = freed[::-1]
        self._num_free += len(freed)

    def _on_device(self, parts: Sequence[NDArray[np.signedinteger]]) -> torch.Tensor:
        return to_device(torch.from_numpy(np.concatenate(parts).astype(np.int64, copy=False)), self._device)


MOST_ROWS = 256
"""Largest number of rows in one pass, whose logits `[rows, V]` are in memory at the same time."""
MOST_NEW_TOKENS = 8192
"""Number of tokens of new rows in one pass, limited because activations take memory. A longer row is read alone."""
_SPARE = 0.01
"""Share of the cache that is not given to new rows, so that running rows can grow before one has to wait."""


class ContinuousEngine(RowsEngine):
    """A `RowsEngine` whose cache stores the tokens of all rows.

    Args:
        settings: Context limit and tokenizer.
        vocab_size: Number of token ids that prompts may contain.
        cache: Cache that assigns positions to tokens.

    Raises:
        GenerationError: A row of the longest length does not fit into the cache.
    """

    def __init__(self, settings: EngineSettings, vocab_size: int, cache: TokenCache) -> None:
        super().__init__(settings, vocab_size)
        if cache.num_places < settings.max_model_len:
            raise GenerationError(
                f"The key-value cache has room for {cache.num_places} tokens, but one row may have "
                f"{settings.max_model_len}. Raise policy.generation.engine.kv_cache_memory_mb (on a GPU without it: "
                "gpu_memory_utilization), or lower max_model_len."
            )
        self._cache = cache
        self._num_preemptions, self._most_used = 0, 0

    @abstractmethod
    def read(self, rows: Mapping[str, Sequence[int]]) -> Tensor:
        """Compute a pass.

        Args:
            rows: Tokens to append to each row. A row that has just entered has none.

        Returns:
            `[b, V]` logits after the last token of each row.
        """

    def enter(self, row: str, token_ids: Sequence[int], adapter: str | None = None) -> None:
        """Call `TokenCache.enter`. An engine of several ranks calls it on all of them, as the next two."""
        self._cache.enter(row, token_ids, adapter)

    def leave(self, rows: Sequence[str]) -> None:
        """Call `TokenCache.leave`."""
        self._cache.leave(rows)

    def clear(self) -> None:
        """Call `TokenCache.clear`."""
        self._cache.clear()

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Advance all rows (`SteppedEngine.step`). The cache has all tokens of a row but the last one.

        A pass reads the rows of one adapter.
        """
        is_full = self._make_room()
        rows = {row.request_id: row.token_ids[-1:] for row in self._active}
        rows |= {} if is_full else self._admitted()
        for part in by_adapter(self._active):
            with self.computing_with(part[0].adapter):
                logits_bV = self.read({row.request_id: rows[row.request_id] for row in part})
            self.extend(part, logits_bV)
        self._most_used = max(self._most_used, self._cache.num_places - self._cache.room)
        return self.take_finished(list(self._active))

    def _make_room(self) -> bool:
        """Preempt the newest rows until all other rows can grow by a token. Return whether any row was preempted."""
        taken_out = []
        while len(self._active) > self._cache.room:
            taken_out.append(self._active.pop())
            self.leave([taken_out[-1].request_id])
        self._waiting[:0] = reversed(taken_out)
        self._num_preemptions += len(taken_out)
        return bool(taken_out)

    def _admitted(self) -> dict[str, list[int]]:
        """Let the first waiting rows that fit into the cache enter, and return them in the form of `read`."""
        admitted: dict[str, list[int]] = {}
        left, most_new = len(self._active) + int(_SPARE * self._cache.num_places), MOST_NEW_TOKENS
        for row in self._waiting[: MOST_ROWS - len(self._active)]:
            tokens = row.tokens
            cost = self._cache.cost(tokens, row.request.adapter)
            if self._active and (cost.num_new > most_new or cost.room + left > self._cache.room):
                break
            self.enter(row.request_id, tokens, row.request.adapter)
            most_new -= cost.num_new
            self._active.append(row)
            admitted[row.request_id] = []
        del self._waiting[: len(admitted)]
        return admitted

    @override
    def drop_finished(self) -> None:
        finished = [row.request_id for row in self._active if row.finish_reason is not None]
        if finished:
            self._active = [row for row in self._active if row.finish_reason is None]
            self.leave(finished)

    def finish_loading(self, *, changed: bool) -> list[str]:
        """Activate the loaded weights. Unfinished rows are read again (`SteppedEngine.finish_loading`)."""
        unbound = self.put_in_force()
        if changed:
            self.clear()
            self._waiting, self._active = self._active + self._waiting, []
        return unbound

    @override
    def take_load(self) -> EngineLoad:
        load = EngineLoad(self._num_preemptions, self._most_used / self._cache.num_places, MOST_ROWS)
        self._num_preemptions, self._most_used = 0, 0
        return load
