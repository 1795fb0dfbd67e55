"""Decode rows that come and go between steps, with a cache that holds their tokens (continuous batching).

    waiting ─► admitted: read whole ─┐
    active:  read their last token ──┴─► one pass ─► draws ─► finished rows leave, and free their room
       ▲                                               │
       └── the cache is full: the newest row waits ◄───┘

Rows with the same prompt share the cached tokens of the prompt. Orca (Yu et al. 2022) describes the schedule, and vLLM
(Kwon et al. 2023, arXiv:2309.06180) the preemption of the newest row, which later reads its tokens again.
"""

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_rl.models.generation.decoding.rows import Row, RowsEngine
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


class NewTokens(NamedTuple):
    """The tokens that a row reads in a pass.

    Attributes:
        row: name of the row.
        token_ids: the tokens, at least one.
        shares: name of the row with whose first tokens this row begins; None: with tokens of its own.
        num_shared: number of these tokens.
    """

    row: str
    token_ids: list[int]
    shares: str | None = None
    num_shared: int = 0


class ContinuousEngine(RowsEngine):
    """A `RowsEngine` whose cache holds the tokens of any rows.

    Args:
        settings: context limit and tokenizer.
        vocab_size: number of token ids that prompts may hold.
        cache_tokens: tokens that the cache has room for.

    Raises:
        GenerationError: a row of the longest length does not fit into the cache.
    """

    def __init__(self, settings: EngineSettings, vocab_size: int, cache_tokens: int) -> None:
        super().__init__(settings, vocab_size)
        if cache_tokens < settings.max_model_len:
            raise GenerationError(
                f"The key-value cache has room for {cache_tokens} tokens, but one row may have "
                f"{settings.max_model_len}. Raise policy.generation.engine.kv_cache_memory_mb (on a GPU without it: "
                "gpu_memory_utilization), or lower max_model_len."
            )
        self._cache_tokens = cache_tokens
        self._num_preemptions, self._most_used = 0, 0

    @abstractmethod
    def read(self, rows: list[NewTokens]) -> Tensor:
        """Read tokens and keep them; return `[b, V]` logits after the last token of each row."""

    @abstractmethod
    def forget(self, rows: list[str]) -> None:
        """Free the tokens of rows, as far as no other row shares them."""

    @property
    @abstractmethod
    def room(self) -> int:
        """Number of tokens that the cache has room for now."""

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """See `SteppedEngine.step`; an active row has all but its last token in the cache."""
        is_full = self._make_room()
        reads = [NewTokens(row.request_id, row.token_ids[-1:]) for row in self._active]
        reads += [] if is_full else self._admitted()
        logits_bV = self.read(reads)
        self._most_used = max(self._most_used, self._cache_tokens - self.room)
        for row, logits_V in zip(self._active, logits_bV, strict=True):
            self.extend(row, logits_V)
        return self.take_finished(list(self._active))

    def _make_room(self) -> bool:
        """Take out the newest rows until the others can grow by a token; return whether there were any."""
        taken_out = []
        while len(self._active) > self.room:
            taken_out.append(self._active.pop())
            self.forget([taken_out[-1].request_id])
        self._waiting[:0] = reversed(taken_out)
        self._num_preemptions += len(taken_out)
        return bool(taken_out)

    def _admitted(self) -> list[NewTokens]:
        """Move the first waiting rows that there is room for to the active ones; return what they read."""
        reads: list[NewTokens] = []
        room, most_new = self.room - len(self._active), MOST_NEW_TOKENS
        by_prompt = {row.prompt_key: row for row in self._active} if self._waiting else {}
        for row in self._waiting[: MOST_ROWS - len(self._active)]:
            read = _whole(row, by_prompt.get(row.prompt_key))
            num_new = len(read.token_ids)
            if self._active and (num_new > most_new or num_new > room - int(_SPARE * self._cache_tokens)):
                break
            room, most_new = room - num_new, most_new - num_new
            reads.append(read)
            self._active.append(row)
            by_prompt.setdefault(row.prompt_key, row)
        del self._waiting[: len(reads)]
        return reads

    def drop_finished(self) -> None:
        """See `RowsEngine.drop_finished`."""
        finished = [row.request_id for row in self._active if row.finish_reason is not None]
        if finished:
            self._active = [row for row in self._active if row.finish_reason is None]
            self.forget(finished)

    def finish_loading(self, *, changed: bool) -> list[str]:
        """See `SteppedEngine.finish_loading`; unfinished rows are read again."""
        unbound = self.put_in_force()
        if changed and self._active:
            self.forget([row.request_id for row in self._active])
            self._waiting, self._active = self._active + self._waiting, []
        return unbound

    def take_load(self) -> EngineLoad:
        """See `SteppedEngine.take_load`."""
        load = EngineLoad(self._num_preemptions, self._most_used / self._cache_tokens, MOST_ROWS)
        self._num_preemptions, self._most_used = 0, 0
        return load


def _whole(row: Row, other: Row | None) -> NewTokens:
    """Return what a row reads from its start, with the prompt's tokens of another active row but the last one."""
    num_shared = 0 if other is None else len(row.request.prompt_token_ids) - 1
    if other is None or num_shared == 0:
        return NewTokens(row.request_id, row.tokens)
    return NewTokens(row.request_id, row.tokens[num_shared:], other.request_id, num_shared)
