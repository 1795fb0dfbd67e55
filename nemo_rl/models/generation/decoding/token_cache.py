"""Give the tokens of rows places in a key-value cache.

Each token has a place of its own, so nothing is lost to padding or blocks. A row that begins like another one, which
runs or has ended, holds the same places for the common tokens, and does not read them again. Places of ended rows are
taken when no other is free, those of the longest ended row first. Every rank of an engine has such a cache. Invariant:
the same calls give the same places on all ranks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_rl.host.device import to_device
from nemo_rl.models.attention import AttentionPlan, Piece
from nemo_rl.models.attention.cached import CachedPass, KeysAndValues

MOST_ENDED = 256
"""Ended rows whose tokens are kept; a new row is compared with each."""


class Cost(NamedTuple):
    """Tokens and places that a row takes when it enters."""

    num_new: int
    """Tokens that it has to read."""
    room: int
    """Places that no running row holds yet."""


@dataclass
class _Held:
    """Tokens of a row and their places; the first `num_read` tokens have keys and values."""

    tokens: NDArray[np.int32]
    places: NDArray[np.int64]
    num_read: int


class TokenCache:
    """Places of the tokens of rows.

    Args:
        num_places: tokens that the cache has room for.
        device: where the keys and values are.

    Attributes:
        num_places: tokens that the cache has room for.
        room: number of places that no running row holds.
    """

    def __init__(self, num_places: int, device: torch.device) -> None:
        self.num_places = self.room = num_places
        self._device = device
        self._free = np.arange(num_places)[::-1].copy()
        """Places that no row holds, the first `_num_free` ones; the last of these is taken next."""
        self._num_free = num_places
        self._holders, self._users = np.zeros((2, num_places), np.int32)
        """How many rows hold each place, and how many of them run."""
        self._running: dict[str, _Held] = {}
        self._ended: dict[str, _Held] = {}
        """Longest ended or unused first."""
        self._layers: dict[int, KeysAndValues] = {}

    def cost(self, token_ids: Sequence[int]) -> Cost:
        """Return what a row with these tokens would take."""
        other, length = self._longest_start(np.array(token_ids, np.int32))
        num_new = len(token_ids) - length
        unused = 0 if other is None else np.count_nonzero(self._users[self._held(other).places[:length]] == 0)
        return Cost(num_new, num_new + int(unused))

    def enter(self, row: str, token_ids: Sequence[int]) -> int:
        """Give places to the tokens of a new row; return how many need not be read, all but one at most."""
        tokens = np.array(token_ids, np.int32)
        other, length = self._longest_start(tokens)
        places = np.empty(0, np.int64) if other is None else self._held(other).places[:length]
        if other in self._ended:
            self._ended[other] = self._ended.pop(other)
        self.room -= int(np.count_nonzero(self._users[places] == 0))
        self._users[places] += 1
        self._holders[places] += 1
        self._running[row] = _Held(tokens[:length], places, length)
        self._extend(self._running[row], tokens[length:])
        return length

    def leave(self, rows: Iterable[str]) -> None:
        """Let rows end; their tokens stay until their places are needed."""
        for row in rows:
            held = self._ended[row] = self._running.pop(row)
            self._users[held.places] -= 1
            self.room += int(np.count_nonzero(self._users[held.places] == 0))
        while len(self._ended) > MOST_ENDED:
            self._drop_oldest()

    def clear(self) -> None:
        """Forget all rows, because the weights have changed."""
        self.leave(list(self._running))
        while self._ended:
            self._drop_oldest()

    def release(self) -> None:
        """Free the memory if no row runs; the next pass allocates it again."""
        if not self._running:
            self.clear()
            self._layers.clear()

    def read(self, rows: Mapping[str, Sequence[int]]) -> CachedPass:
        """Append tokens to running rows, and describe the pass that reads all their new tokens.

        Args:
            rows: tokens to append to each row; none if it has just entered.
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

    def _longest_start(self, tokens: NDArray[np.int32]) -> tuple[str | None, int]:
        """Return the row with the most first tokens of `tokens`, but not the last one, and their number."""
        best, length, most = None, 0, len(tokens) - 1
        for row, held in chain(self._running.items(), self._ended.items()):
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
        """Forget the row that ended or was shared longest ago."""
        places = self._ended.pop(next(iter(self._ended))).places
        self._holders[places] -= 1
        freed = places[self._holders[places] == 0]
        self._free[self._num_free : self._num_free + len(freed)] = freed[::-1]
        self._num_free += len(freed)

    def _on_device(self, parts: Sequence[NDArray[np.signedinteger]]) -> torch.Tensor:
        return to_device(torch.from_numpy(np.concatenate(parts).astype(np.int64, copy=False)), self._device)
