"""Decode rows that come and go between steps, with a cache that holds their tokens (continuous batching).

    waiting ─► admitted: read whole ─┐
    active:  read their last token ──┴─► one pass ─► draws ─► finished rows leave, and free their room
       ▲                                               │
       └── the cache is full: the newest row waits ◄───┘

Rows that begin alike share the cached tokens of their beginning. Orca (Yu et al. 2022) describes the schedule, and vLLM
(Kwon et al. 2023, arXiv:2309.06180) the preemption of the newest row, which later reads its tokens again.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import override

import torch
from torch import Tensor

from nemo_rl.models.generation.decoding.rows import RowsEngine
from nemo_rl.models.generation.decoding.token_cache import TokenCache
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.reports.load import EngineLoad
from nemo_rl.models.generation.stepped import Finished
from nemo_rl.utils.errors import GenerationError

MOST_ROWS = 256
"""Most rows in one pass: their scores, `[rows, V]`, are in memory together."""
MOST_NEW_TOKENS = 8192
"""Tokens of admitted rows in one pass, whose activations are in memory together; one longer row is read alone."""
_SPARE = 0.01
"""Share of the cache that admission leaves free, so that the rows can grow before one has to wait again."""


class ContinuousEngine(RowsEngine):
    """A `RowsEngine` whose cache holds the tokens of any rows.

    Args:
        settings: context limit and tokenizer.
        vocab_size: number of token ids that prompts may hold.
        cache: places of the tokens.

    Raises:
        GenerationError: a row of the longest length does not fit into the cache.
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
            rows: the tokens that each row goes on with; none if it has just entered.

        Returns:
            `[b, V]` logits after the last token of each row.
        """

    @abstractmethod
    def enter(self, row: str, token_ids: Sequence[int]) -> None:
        """Call `TokenCache.enter` on all ranks."""

    @abstractmethod
    def leave(self, rows: Sequence[str]) -> None:
        """Call `TokenCache.leave` on all ranks."""

    @abstractmethod
    def clear(self) -> None:
        """Call `TokenCache.clear` on all ranks."""

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """See `SteppedEngine.step`; an active row has all but its last token in the cache."""
        is_full = self._make_room()
        rows = {row.request_id: row.token_ids[-1:] for row in self._active}
        rows |= {} if is_full else self._admitted()
        logits_bV = self.read(rows)
        self._most_used = max(self._most_used, self._cache.num_places - self._cache.room)
        for row, logits_V in zip(self._active, logits_bV, strict=True):
            self.extend(row, logits_V)
        return self.take_finished(list(self._active))

    def _make_room(self) -> bool:
        """Take out the newest rows until the others can grow by a token; return whether there were any."""
        taken_out = []
        while len(self._active) > self._cache.room:
            taken_out.append(self._active.pop())
            self.leave([taken_out[-1].request_id])
        self._waiting[:0] = reversed(taken_out)
        self._num_preemptions += len(taken_out)
        return bool(taken_out)

    def _admitted(self) -> dict[str, list[int]]:
        """Let the first waiting rows enter that there is room for; see `read`."""
        admitted: dict[str, list[int]] = {}
        left, most_new = len(self._active) + int(_SPARE * self._cache.num_places), MOST_NEW_TOKENS
        for row in self._waiting[: MOST_ROWS - len(self._active)]:
            tokens = row.tokens
            cost = self._cache.cost(tokens)
            if self._active and (cost.num_new > most_new or cost.room + left > self._cache.room):
                break
            self.enter(row.request_id, tokens)
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
        """See `SteppedEngine.finish_loading`; unfinished rows are read again."""
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
