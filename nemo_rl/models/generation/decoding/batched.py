"""Decode one batch after another.

When the engine is idle, all waiting requests form a batch; later requests wait for the next one. The rows of a batch
end in the same column and grow together until the last one is finished. The engine is simple, small and exact, but
slow.
"""

from abc import abstractmethod
from typing import NamedTuple, override

import torch
from torch import Tensor

from nemo_rl.data.model_rows import RowInputs, completed
from nemo_rl.models.generation.decoding.rows import RowsEngine
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.stepped import Finished


class FurtherInputs(NamedTuple):
    """Rows of a batch with their inputs next to the tokens."""

    tokens: list[list[int]]
    """Prompt and response so far of each row."""
    column: list[RowInputs]
    """Inputs of each row."""


class BatchedEngine(RowsEngine):
    """A `RowsEngine` with a cache for one batch; see `RowsEngine` for the arguments."""

    def __init__(self, settings: EngineSettings, vocab_size: int) -> None:
        super().__init__(settings, vocab_size)
        self._next_ids: list[int] | None = None
        """Token ids that the rows read next; None: all their tokens."""

    @property
    def further_inputs(self) -> FurtherInputs | None:
        """The inputs of the rows that `read` or `advance` processes; None if no row has any."""
        column = [row.request.row_inputs for row in self._active]
        if all(inputs is None for inputs in column):
            return None
        return FurtherInputs([row.tokens for row in self._active], completed(column))

    @abstractmethod
    def read(self, rows: list[list[int]]) -> Tensor:
        """Start a batch of rows, given by their tokens, and free the previous one; return `[b, V]` next logits."""

    @abstractmethod
    def advance(self, token_ids: list[int]) -> Tensor:
        """Read one more token of each row; return `[b, V]` logits of the next one."""

    @abstractmethod
    def forget(self) -> None:
        """Free the batch's cache."""

    @override
    @torch.inference_mode()
    def step(self) -> list[Finished]:
        if not self._active:
            self._active, self._waiting = self._waiting, []
        if self._next_ids is None:
            logits_bV = self.read([row.tokens for row in self._active])
        else:
            logits_bV = self.advance(self._next_ids)
        written = [row for row in self._active if row.finish_reason is None]
        self._next_ids = [
            self.extend(row, logits_V) if row.finish_reason is None else row.tokens[-1]
            for row, logits_V in zip(self._active, logits_bV, strict=True)
        ]
        return self.take_finished(written)

    def drop_finished(self) -> None:
        """See `RowsEngine.drop_finished`; rows stay in the batch until its last one is finished."""
        if all(row.finish_reason is not None for row in self._active):
            self._active, self._next_ids = [], None
            self.forget()

    def finish_loading(self, *, changed: bool) -> list[str]:
        """See `SteppedEngine.finish_loading`; unfinished rows are read again."""
        unbound = self.put_in_force()
        if changed:
            self._active = [row for row in self._active if row.finish_reason is None]
            self._next_ids = None
        return unbound
