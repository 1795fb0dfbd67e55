"""Ask the model of an endpoint for answers: a bound on requests at the same time, attempts with growing pauses.

    generate() ─► slot ─► request ─► answer
                   ▲  pause, twice as long each time │ overloaded, unreachable, too slow, no completion
                   └─────────────────────────────────┘ at most max_attempts

Invariant: a request gets an answer of the model or a `NoAnswerError`, never an empty text in place of one; an endpoint
that refuses every request ends the run.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, override

import numpy as np

from nemo_rl.config.schema.model.endpoint import ModelEndpointConfig
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.models.generation.interfaces import (
    FinishReason,
    GenerationInterface,
    GenerationRequest,
    GenerationResult,
)
from nemo_rl.models.generation.remote.answers import UnreadableError, WithheldError, read_completion
from nemo_rl.models.generation.remote.chats import ChatAnswer
from nemo_rl.models.generation.remote.connection import EndpointConnection, EndpointError, key_of, pause_s
from nemo_rl.models.generation.remote.fields import chat_body
from nemo_rl.utils.errors import EndpointUnusableError, NoAnswerError

logger = logging.getLogger(__name__)

SECTION = "generation.endpoint"
_LARGEST_BYTES = 64 << 20
_SHOWN_CHARS = 300
_OF_THE_RUN = frozenset((401, 402, 404, 405))
"""Statuses that every request of the run would get: a wrong key, no money, no such model or path."""
_BOUNDS = ("max_tokens", "max_completion_tokens")
"""Fields that bound the tokens of an answer."""
_FULL = (
    "context length",
    "context_length",
    "context window",
    "maximum length",
    "too many tokens",
    "prompt is too long",
)
"""Words with which servers say that a conversation does not fit into the model's context."""


@dataclass
class RequestCounts:
    """Numbers of requests."""

    requests: int = 0
    """Requests that were sent."""
    repeated: int = 0
    """Requests of these that were sent again after a failure."""
    answers: int = 0
    """Answers that arrived."""
    without_answer: int = 0
    """Conversations that got none, though they had room."""
    refused: int = 0
    """Conversations of these whose request was refused, as it would be again."""
    last_error: str = ""
    """Why the last of them got none."""


class ChatModel(GenerationInterface):
    """The model of an OpenAI-compatible endpoint; for one event loop.

    Args:
        tokenizer: encodes answers for the message log.

    Raises:
        ConfigError: the environment variable of the key is not set.
    """

    reads_chats: ClassVar[bool] = True

    def __init__(self, config: ModelEndpointConfig, tokenizer: TokenizerType) -> None:
        self.weight_version = 0
        self.counts = RequestCounts()
        """Counts of the requests so far."""
        self._config = config
        self._tokenizer = tokenizer
        self._connection = connection_to(config)
        self._slots = asyncio.Semaphore(config.max_concurrent_requests)
        self._open = 0

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See `GenerationInterface.generate`.

        Raises:
            NoAnswerError: there is no answer to this request after all attempts.
            EndpointUnusableError: the endpoint refuses the run.
            DataError: a message has content that is not text.
        """
        body = chat_body(self._config, request)
        try:
            answer, reason = await self._answer(body)
        except NoAnswerError as error:
            if not error.is_too_long:
                self.counts.without_answer += 1
                self.counts.refused += error.is_refused
                self.counts.last_error = str(error)
            raise
        self.counts.answers += 1
        ids = np.array(self._tokenizer(answer.text, add_special_tokens=False)["input_ids"], dtype=np.int32)
        unknown = np.full(len(ids), np.nan, dtype=np.float32)
        return GenerationResult(ids, unknown, reason, [], text=answer.text, answer=answer)

    @override
    def describe_open(self) -> str:
        return f"{self._open} requests to {self._config.base_url} are open." if self._open else ""

    def shutdown(self) -> None:
        """Log the numbers of requests; connections end with the event loop."""
        counts = self.counts
        logger.info(
            "Endpoint %s: %d requests, %d of them sent again after a failure, %d answers, %d without an answer.",
            self._config.base_url,
            counts.requests,
            counts.repeated,
            counts.answers,
            counts.without_answer,
        )

    async def _answer(self, body: Mapping[str, Any]) -> tuple[ChatAnswer, FinishReason]:
        """Get an answer.

        A server that refuses a prompt together with `max_tokens` may have room for a shorter answer, which ends at its
        context, as answers of own engines do. So it is asked again without the field, or without the one that takes its
        place for reasoning models.
        """
        unbounded = {name: value for name, value in body.items() if name not in _BOUNDS}
        try:
            return await self._attempts(body)
        except NoAnswerError as error:
            if not error.is_too_long or len(unbounded) == len(body):
                raise
        return await self._attempts(unbounded)

    async def _attempts(self, body: Mapping[str, Any]) -> tuple[ChatAnswer, FinishReason]:
        config, attempt = self._config, 0
        while True:
            try:
                return await self._ask(body)
            except EndpointError as error:
                attempt += 1
                if not error.may_pass:
                    raise _refusal(error) from None
                if attempt >= config.max_attempts:
                    raise NoAnswerError(f"{error} (attempt {attempt} of {config.max_attempts})") from None
                wait_s = pause_s(attempt - 1, config.backoff_s, config.max_backoff_s, error.wait_s)
                logger.debug("Attempt %d: %s; the next one follows in %.1f s.", attempt, error, wait_s)
            self.counts.repeated += 1
            await asyncio.sleep(wait_s)

    async def _ask(self, body: Mapping[str, Any]) -> tuple[ChatAnswer, FinishReason]:
        async with self._slots:
            self._open += 1
            self.counts.requests += 1
            try:
                completion = await self._connection.ask("POST", "chat/completions", body)
            finally:
                self._open -= 1
        try:
            return read_completion(completion)
        except WithheldError as error:
            reason = f"{self._config.base_url} has withheld the answer: {error}"
            raise NoAnswerError(reason, is_refused=True, is_withheld=True) from None
        except UnreadableError as error:
            shown = self._connection.safe(f"{error}: {completion}")[:_SHOWN_CHARS]
            raise EndpointError(f"{self._config.base_url} sent no chat completion: {shown}") from None


def connection_to(config: ModelEndpointConfig, timeout_s: float | None = None) -> EndpointConnection:
    """Return a connection to an endpoint.

    Args:
        config: the section.
        timeout_s: seconds for one request; None: those of the section.

    Raises:
        ConfigError: the environment variable of the key is not set.
    """
    return EndpointConnection(
        "the model's endpoint",
        config.base_url,
        key_of(config.api_key_env, f"{SECTION}.api_key_env", "the evaluation"),
        timeout_s or config.timeout_s,
        f"{SECTION}.timeout_s",
        config.max_concurrent_requests,
        _LARGEST_BYTES,
    )


def _refusal(error: EndpointError) -> NoAnswerError | EndpointUnusableError:
    """Return what a refused request means: for the run, or for its sample alone."""
    if error.status in _OF_THE_RUN:
        return EndpointUnusableError(
            f"{error}\nCheck {SECTION}.model, base_url and api_key_env. With eval.save_path the same command continues."
        )
    text = str(error).lower()
    is_too_long = error.status in (400, 413, 422) and any(words in text for words in _FULL)
    return NoAnswerError(str(error), is_too_long=is_too_long, is_refused=True)
