"""Give the tokens of rows places in a key-value cache.

Each token has a place of its own, so nothing is lost to padding or blocks, and rows with the same first tokens hold the
same places. Every rank of an engine has such a cache. Invariant: the same calls give the same places on all ranks.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_rl.host.device import to_device
from nemo_rl.models.attention import AttentionPlan, Piece
from nemo_rl.models.attention.cached import CachedPass, KeysAndValues
from nemo_rl.models.generation.decoding.continuous import NewTokens


class TokenCache:
    """Places of the tokens of rows.

    Args:
        num_places: tokens that the cache has room for.
        device: where the keys and values are.
    """

    def __init__(self, num_places: int, device: torch.device) -> None:
        self._device = device
        self._holders = np.zeros(num_places, np.int32)
        self._free = np.arange(num_places)[::-1].copy()
        self._rows: dict[str, NDArray[np.int64]] = {}
        self._layers: dict[int, KeysAndValues] = {}
        self.room = num_places
        """Number of free places; they are the first ones of `_free`."""

    def add(self, reads: Sequence[NewTokens]) -> CachedPass:
        """Give places to the new tokens of rows, and describe the pass that reads them."""
        before = []
        for read in reads:
            if read.shares is not None:
                self._rows[read.row] = self._rows[read.shares][: read.num_shared]
                self._holders[self._rows[read.row]] += 1
            held = self._rows.get(read.row, np.empty(0, np.int64))
            before.append(len(held))
            self._rows[read.row] = np.concatenate([held, self._take(len(read.token_ids))])
        seen = [self._rows[read.row] for read in reads]
        new = [places[start:] for places, start in zip(seen, before, strict=True)]
        queries, keys = (list(pairwise(accumulate(map(len, rows), initial=0))) for rows in (new, seen))
        return CachedPass(
            positions=self._on_device([np.arange(start, len(row)) for row, start in zip(seen, before, strict=True)]),
            new=self._on_device(new),
            seen=self._on_device(seen),
            plan=AttentionPlan([Piece(*query, *key) for query, key in zip(queries, keys, strict=True)]),
            last=self._on_device([np.array([stop - 1 for _, stop in queries])]),
            num_places=len(self._holders),
            layers=self._layers,
        )

    def _take(self, count: int) -> NDArray[np.int64]:
        assert count <= self.room, f"{count} tokens do not fit into {self.room} places"
        self.room -= count
        places: NDArray[np.int64] = self._free[self.room : self.room + count][::-1].copy()
        self._holders[places] = 1
        return places

    def forget(self, rows: Iterable[str]) -> None:
        """Free the places of rows that no other row holds."""
        for row in rows:
            places = self._rows.pop(row)
            self._holders[places] -= 1
            freed = places[self._holders[places] == 0]
            self._free[self.room : self.room + len(freed)] = freed[::-1]
            self.room += len(freed)

    def release(self) -> None:
        """Free the memory, if no row holds a place; the next pass allocates it again."""
        if not self._rows:
            self._layers.clear()

    def _on_device(self, parts: Sequence[NDArray[np.int64]]) -> torch.Tensor:
        return to_device(torch.from_numpy(np.concatenate(parts)), self._device)
