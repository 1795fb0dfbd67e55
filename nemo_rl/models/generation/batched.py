"""Decode one batch after another with a model and its key-value cache: rows, stops and draws.

When the engine is idle, the waiting requests that fit its cache form a batch; later requests wait for the next batch.
All rows of a batch end in the same column and grow together until the last one is finished. The engine is simple, small
and exact, but slow. Invariant: a row's response depends on its own tokens, inputs and generator only.
"""

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer

from nemo_rl.data.model_rows import RowInputs, completed
from nemo_rl.models.generation.interfaces import EngineSettings, FinishReason, GenerationRequest
from nemo_rl.models.generation.sampling import bad_word_ids, banned_tokens, draw
from nemo_rl.models.generation.stepped import Finished, SteppedEngine
from nemo_rl.models.generation.texts import sampled_text
from nemo_rl.models.training.finite import not_finite
from nemo_rl.utils.errors import GenerationError


@dataclass
class _Row:
    request_id: str
    request: GenerationRequest
    generator: torch.Generator
    bad_words: list[list[int]]
    most_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def tokens(self) -> list[int]:
        """The prompt and the response so far."""
        return self.request.prompt_token_ids + self.token_ids


class FurtherInputs(NamedTuple):
    """Rows of a batch with their inputs next to the tokens.

    Attributes:
        tokens: prompt and response so far of each row.
        column: inputs of each row.
    """

    tokens: list[list[int]]
    column: list[RowInputs]


class BatchedEngine(SteppedEngine):
    """A `SteppedEngine` made of a model, which a subclass puts into `_model`, and its cache.

    Args:
        settings: context limit and tokenizer.
        vocab_size: number of token ids that prompts may hold.
        cache_tokens: most tokens of all rows together in the cache; None: any number.
    """

    _model: Any

    def __init__(self, settings: EngineSettings, vocab_size: int, cache_tokens: int | None = None) -> None:
        super().__init__()
        self._max_model_len, self._vocab_size, self._cache_tokens = settings.max_model_len, vocab_size, cache_tokens
        self._tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer_name)
        self._waiting: list[_Row] = []
        self._active: list[_Row] = []
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
    def read(self, rows: list[list[int]], most_new: int) -> Tensor:
        """Start a batch, and free the previous one.

        Args:
            rows: tokens of each row.
            most_new: most tokens that are added to a row, including the next one.

        Returns:
            `[b, V]` logits of the next token.
        """

    @abstractmethod
    def advance(self, token_ids: list[int]) -> Tensor:
        """Read one more token of each row; return `[b, V]` logits of the next one."""

    @abstractmethod
    def forget(self) -> None:
        """Free the batch's cache."""

    @abstractmethod
    def put_in_force(self) -> list[str]:
        """Complete the loaded weights; return the parameters that received nothing."""

    def add_request(self, request_id: str, request: GenerationRequest) -> None:
        """See `SteppedEngine.add_request`."""
        ids, limit = request.prompt_token_ids, self._max_model_len
        if not 0 < len(ids) < limit:
            raise GenerationError(f"A prompt of {len(ids)} tokens does not fit the context of {limit}.")
        if not all(0 <= token < self._vocab_size for token in ids):
            raise GenerationError(f"A prompt holds token ids outside 0..{self._vocab_size - 1}.")
        generator = torch.Generator().manual_seed(request.seed)
        bad_words = bad_word_ids(request.sampling.bad_words, self._tokenizer)
        most_tokens = min(request.sampling.max_new_tokens, limit - len(ids))
        self._waiting.append(_Row(request_id, request, generator, bad_words, most_tokens))

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """See `SteppedEngine.step`."""
        if not self._active:
            self._active = self._next_batch()
        if self._next_ids is None:
            most_new = max(row.most_tokens - len(row.token_ids) for row in self._active)
            logits_bV = self.read([row.tokens for row in self._active], most_new)
        else:
            logits_bV = self.advance(self._next_ids)
        written = [row for row in self._active if row.finish_reason is None]
        self._next_ids = [
            self._extend(row, logits_V) if row.finish_reason is None else row.tokens[-1]
            for row, logits_V in zip(self._active, logits_bV, strict=True)
        ]
        return self._take_finished(written)

    def _next_batch(self) -> list[_Row]:
        """Take the first waiting rows that the cache has room for, at least one."""
        longest = most_new = count = 0
        for row in self._waiting:
            longest, most_new = max(longest, len(row.tokens)), max(most_new, row.most_tokens)
            needed = (count + 1) * (longest + most_new)
            if count and self._cache_tokens is not None and needed > self._cache_tokens:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    def _extend(self, row: _Row, logits_V: Tensor) -> int:
        sampling = row.request.sampling
        token, logprob = draw(logits_V, sampling, row.generator, banned_tokens(row.bad_words, row.token_ids))
        row.token_ids.append(token)
        row.logprobs.append(logprob)
        if token in sampling.stop_token_ids or self._hits_stop_string(row):
            row.finish_reason = "stop"
        elif len(row.token_ids) >= row.most_tokens:
            row.finish_reason = "length"
        return token

    def _hits_stop_string(self, row: _Row) -> bool:
        if not row.request.sampling.stop_strings:
            return False
        text = self._tokenizer.decode(row.token_ids)
        return any(stop in text for stop in row.request.sampling.stop_strings)

    def remove_requests(self, request_ids: Collection[str]) -> list[Finished]:
        """See `SteppedEngine.remove_requests`; their rows stay in the batch until it is finished."""
        rows = [row for row in (*self._waiting, *self._active) if row.request_id in request_ids]
        self._waiting = [row for row in self._waiting if row.request_id not in request_ids]
        for row in rows:
            row.finish_reason = "abort"
        return self._take_finished(rows)

    def _take_finished(self, rows: list[_Row]) -> list[Finished]:
        """Return the finished ones of the rows; the batch ends when its last row is finished."""
        if all(row.finish_reason is not None for row in self._active):
            self._active, self._next_ids = [], None
            self.forget()
        return [
            Finished(row.request_id, row.token_ids, row.logprobs, row.finish_reason)
            for row in rows
            if row.finish_reason is not None
        ]

    def weights_not_finite(self) -> list[str]:
        """See `SteppedEngine.weights_not_finite`."""
        return not_finite(dict(self._model.named_parameters()))

    def decode(self, token_ids: list[int]) -> str:
        """See `SteppedEngine.decode`."""
        return sampled_text(self._tokenizer, token_ids)

    def sampled_so_far(self, request_id: str) -> tuple[list[int], list[float]]:
        """See `SteppedEngine.sampled_so_far`."""
        row = self._row(request_id)
        return row.token_ids, row.logprobs

    def num_tokens(self, request_id: str) -> int:
        """See `SteppedEngine.num_tokens`."""
        return len(self._row(request_id).token_ids)

    def _row(self, request_id: str) -> _Row:
        return next(row for row in (*self._active, *self._waiting) if row.request_id == request_id)

    def finish_loading(self, *, changed: bool) -> list[str]:
        """See `SteppedEngine.finish_loading`; unfinished rows are read again."""
        unbound = self.put_in_force()
        if changed:
            self._active = [row for row in self._active if row.finish_reason is None]
            self._next_ids = None
        return unbound
