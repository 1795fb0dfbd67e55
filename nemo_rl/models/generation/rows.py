"""Manage the rows of an engine that draws every token itself: their requests and ends.

Each request has a generator with its own seed. Invariant: a row's response depends only on its own tokens, inputs and
generator.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import isnan
from typing import Any, override

import torch
from torch import Tensor

from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.models.adapters.tensors import AdapterTensors
from nemo_rl.models.generation.draws import Distribution, Drawn, bad_word_ids, banned_tokens, draw
from nemo_rl.models.generation.interfaces import EngineSettings, FinishReason, GenerationRequest
from nemo_rl.models.generation.responses import sampled_text
from nemo_rl.models.generation.stepped import Finished, SteppedEngine
from nemo_rl.models.training.tensor_checks import not_finite
from nemo_rl.utils.errors import GenerationError, NonFiniteError


@dataclass
class Row:
    """A request with its response so far."""

    request_id: str
    """Id of the request."""
    request: GenerationRequest
    """The prompt with its sampling parameters."""
    generator: torch.Generator
    """Random generator of the row."""
    bad_words: list[list[int]]
    """Token ids of texts that are never drawn."""
    most_tokens: int
    """Largest number of tokens of the response."""
    token_ids: list[int] = field(default_factory=list)
    """The response so far."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of its tokens."""
    finish_reason: FinishReason | None = None
    """Reason why the response ended. None while it continues."""
    adapter: AdapterTensors | None = None
    """Adapter of the request. The row keeps it if the engine forgets it."""
    error: str | None = None
    """Reason why the response cannot be continued. None if it can."""

    @property
    def tokens(self) -> list[int]:
        """The prompt and the response so far."""
        return self.request.prompt_token_ids + self.token_ids

    @property
    def last_token(self) -> int:
        """The last token of the response, or of the prompt before the response begins."""
        return (self.token_ids or self.request.prompt_token_ids)[-1]


def by_adapter(rows: Iterable[Row]) -> list[list[Row]]:
    """Group rows by their adapters, in the order of the first row of each."""
    groups: dict[str | None, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.request.adapter, []).append(row)
    return list(groups.values())


class RowsEngine(SteppedEngine):
    """A `SteppedEngine` with rows. A subclass sets `_model`.

    Args:
        settings: context limit and tokenizer.
        vocab_size: number of token ids that prompts may contain.
    """

    _model: Any

    def __init__(self, settings: EngineSettings, vocab_size: int) -> None:
        super().__init__()
        self._max_model_len, self._vocab_size = settings.max_model_len, vocab_size
        self._media_tokens = settings.media_tokens
        self._tokenizer = load_tokenizer(settings.tokenizer_name)
        self._waiting: list[Row] = []
        self._active: list[Row] = []

    @abstractmethod
    def put_in_force(self) -> list[str]:
        """Activate the loaded weights, and return the names of the parameters that were not loaded."""

    @abstractmethod
    def drop_finished(self) -> None:
        """Remove finished rows from the active rows, and free their resources if possible."""

    def adapter_of(self, request: GenerationRequest) -> AdapterTensors | None:
        """Return the adapter that a request names. By default, the engine has none.

        Raises:
            GenerationError: the engine does not have the adapter.
        """
        if request.adapter is not None:
            raise GenerationError(f"This engine has no adapters, and the request names {request.adapter!r}.")
        return None

    def computing_with(self, adapter: AdapterTensors | None) -> AbstractContextManager[None]:
        """Compute with an adapter in a block. By default, there are no adapters."""
        return nullcontext()

    @override
    def add_request(self, request_id: str, request: GenerationRequest) -> None:
        ids, limit = request.prompt_token_ids, self._max_model_len
        if not 0 < len(ids) < limit:
            raise GenerationError(f"A prompt of {len(ids)} tokens does not fit the context of {limit}.")
        if not all(0 <= token < self._vocab_size for token in ids):
            raise GenerationError(f"A prompt holds token ids outside 0..{self._vocab_size - 1}.")
        generator = torch.Generator().manual_seed(request.seed)
        bad_words = bad_word_ids(request.sampling.bad_words, self._tokenizer)
        most_tokens = min(request.sampling.max_new_tokens, limit - len(ids))
        adapter = self.adapter_of(request)
        self._waiting.append(Row(request_id, request, generator, bad_words, most_tokens, adapter=adapter))

    def extend(self, rows: Sequence[Row], logits_bV: Tensor) -> None:
        """Draw the next token of each row, and check whether it ends the response.

        Raises:
            NonFiniteError: The logits of a row without an adapter contain NaN or +inf.
        """
        places: dict[Distribution, list[int]] = {}
        for place, row in enumerate(rows):
            banned = [*banned_tokens(row.bad_words, row.token_ids), *self._media_tokens]
            places.setdefault(Distribution.of(row.request.sampling, banned), []).append(place)
        drawn: dict[int, Drawn] = {}
        for distribution, some in places.items():
            logits = logits_bV if len(some) == len(rows) else logits_bV[some]
            drawn.update(zip(some, draw(logits, distribution, [rows[place].generator for place in some]), strict=True))
        for place, row in enumerate(rows):
            self._append(row, drawn[place])

    def _append(self, row: Row, drawn: Drawn) -> None:
        """Append a token to a row, unless its logits were not finite."""
        if isnan(drawn.logprob):
            if row.adapter is None:
                raise NonFiniteError("The engine's logits are not finite.")
            # Only the requests of this adapter fail, and those of others continue.
            row.finish_reason, row.error = "abort", f"The logits of {row.request.adapter!r} are not finite."
            return
        row.token_ids.append(drawn.token)
        row.logprobs.append(drawn.logprob)
        sampling = row.request.sampling
        if drawn.token in sampling.stop_token_ids or self._hits_stop_string(row):
            row.finish_reason = "stop"
        elif len(row.token_ids) >= row.most_tokens:
            row.finish_reason = "length"

    def _hits_stop_string(self, row: Row) -> bool:
        if not row.request.sampling.stop_strings:
            return False
        text = self._tokenizer.decode(row.token_ids)
        return any(stop in text for stop in row.request.sampling.stop_strings)

    @override
    def remove_requests(self, request_ids: Collection[str]) -> list[Finished]:
        rows = [row for row in (*self._waiting, *self._active) if row.request_id in request_ids]
        self._waiting = [row for row in self._waiting if row.request_id not in request_ids]
        for row in rows:
            row.finish_reason = "abort"
        return self.take_finished(rows)

    def take_finished(self, rows: Iterable[Row]) -> list[Finished]:
        """Return the finished rows and free their resources."""
        self.drop_finished()
        return [
            Finished(row.request_id, row.token_ids, row.logprobs, row.finish_reason, row.error)
            for row in rows
            if row.finish_reason is not None
        ]

    @override
    def weights_not_finite(self) -> list[str]:
        return not_finite(dict(self._model.named_parameters()))

    @override
    def decode(self, token_ids: list[int]) -> str:
        return sampled_text(self._tokenizer, token_ids)

    @override
    def sampled_so_far(self, request_id: str) -> tuple[list[int], list[float]]:
        row = self._row(request_id)
        return row.token_ids, row.logprobs

    @override
    def num_tokens(self, request_id: str) -> int:
        return len(self._row(request_id).token_ids)

    def _row(self, request_id: str) -> Row:
        return next(row for row in (*self._active, *self._waiting) if row.request_id == request_id)
