"""Ask the model of an endpoint for answers, and repeat failed requests with growing pauses.

    generate() ─► slot ─► request ─► answer
                   ▲  pause, twice as long each time │ overloaded, unreachable, too slow, no completion
                   └─────────────────────────────────┘ at most max_attempts

Invariants: a request gets an answer of the model or a `NoAnswerError`, but never an empty text instead of an answer. An
endpoint that refuses every request ends the run.

Requests contain only the fields that every server accepts and those in the configuration. Invariants of reading a chat
completion: an answer is exactly what the server sent. An answer that the server withheld is not an answer. Texts
contain no lone surrogates.
"""

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, override

import numpy as np

from nemo_rl.config.schema.model.endpoint import ModelEndpointConfig
from nemo_rl.data.interfaces import Message, TokenizerType
from nemo_rl.data.messages.observations import template_message
from nemo_rl.data.messages.template_form import known_role
from nemo_rl.models.generation.interfaces import (
    FinishReason,
    GenerationInterface,
    GenerationRequest,
    GenerationResult,
    Grammar,
    SamplingParams,
)
from nemo_rl.models.generation.remote.chats import ChatAnswer, ChatInput, ChatToolCall, whole
from nemo_rl.models.generation.remote.connection import EndpointConnection, EndpointError, ask_again, key_of
from nemo_rl.utils.errors import EndpointUnusableError, NoAnswerError

_KEPT = ("role", "content", "name", "tool_calls", "tool_call_id")
"""Fields of messages that all servers accept."""


def chat_body(config: ModelEndpointConfig, request: GenerationRequest) -> dict[str, Any]:
    """Return the fields of a request. Fields that `extra_body` sets to null are left out.

    Args:
        request: The request, whose `chat` must be set.

    Raises:
        DataError: A message has content that is not text.
    """
    chat = request.chat
    assert chat is not None, "rollouts give it to models that read chats"
    body = {
        "model": config.model,
        "messages": list(wire_messages(chat.messages)),
        "seed": request.seed,
        **_sampling(request.sampling),
        **_around(chat),
    }
    body |= config.extra_body
    return {name: value for name, value in body.items() if name not in config.extra_body or value is not None}


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
    }
    optional = {
        "stop": list(sampling.stop_strings),
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_token_ids),
        "bad_words": list(sampling.bad_words),
        **_form(sampling.grammar),
    }
    return fields | {name: value for name, value in optional.items() if value}


def _form(grammar: Grammar | None) -> dict[str, Any]:
    """Return the field for the required form: OpenAI's field for JSON, and vLLM's field for other forms."""
    if grammar is None:
        return {}
    kind, definition = grammar
    if kind != "json":
        return {"structured_outputs": {kind: json.loads(definition) if kind == "choice" else definition}}
    schema = {"name": "answer", "schema": json.loads(definition)}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _around(chat: ChatInput) -> dict[str, Any]:
    """Return the fields of a conversation besides its messages."""
    fields: dict[str, Any] = {}
    if chat.tools:
        fields["tools"] = [dict(tool) for tool in chat.tools]
        if not chat.may_call:
            fields["tool_choice"] = "none"
        if chat.forced_tool is not None:
            named = {"type": "function", "function": {"name": chat.forced_tool}}
            fields["tool_choice"] = named if chat.forced_tool else "required"
            if chat.calls_once:
                fields["parallel_tool_calls"] = False
    if chat.template_kwargs:
        fields["chat_template_kwargs"] = dict(chat.template_kwargs)
    return fields


def wire_messages(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages in the form that servers expect.

    Roles that servers do not accept become "user". Arguments of tool calls become JSON text. A tool call without an id
    gets an id. Tool answers without an id get the ids of the preceding calls, in order.

    Raises:
        DataError: The content of a message is not text.
    """
    open_ids: list[str] = []
    for number, message in enumerate(messages):
        known = template_message({**message, "content": message.get("content") or ""})
        known = {name: known[name] for name in _KEPT if known.get(name) is not None}
        known["role"] = known_role(known["role"], knows_developer=False)
        if known.get("tool_calls"):
            known["tool_calls"] = [
                _call_field(call, f"call_{number}_{n}") for n, call in enumerate(known["tool_calls"])
            ]
            open_ids = [call["id"] for call in known["tool_calls"]]
            known["content"] = known["content"] or None
        elif known["role"] == "tool":
            if "tool_call_id" not in known and open_ids:
                known["tool_call_id"] = open_ids.pop(0)
        else:
            open_ids = []
        yield known


def _call_field(call: Mapping[str, Any], fallback_id: str) -> dict[str, Any]:
    function = call.get("function") or call
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {
        "id": call.get("id") or fallback_id,
        "type": "function",
        "function": {"name": function.get("name"), "arguments": text},
    }


_FINISH_REASONS: dict[str | None, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "length": "length",
}
WITHHELD = "content_filter"


class UnreadableError(ValueError):
    """Error of JSON that is not a chat completion."""


class WithheldError(ValueError):
    """Error of an answer that the server withheld."""


def read_completion(completion: Any) -> tuple[ChatAnswer, FinishReason]:
    """Return the answer of a completion and its finish reason.

    Raises:
        UnreadableError: The object is not a chat completion. The message says what is wrong.
        WithheldError: The server has withheld the answer.
    """
    if not isinstance(completion, Mapping):
        raise UnreadableError(f"a {type(completion).__name__} in place of an object")
    if "choices" not in completion and completion.get("error"):
        raise UnreadableError(f"status 200 with an error: {completion['error']}")
    try:
        choice = completion["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason")
        if reason == WITHHELD:
            raise WithheldError(f"finish_reason={WITHHELD}")
        if reason not in _FINISH_REASONS:
            raise UnreadableError(f"finish_reason={reason!r}")
        answer = ChatAnswer(
            _text(message, "content") or _text(message, "refusal") or "",
            _text(message, "reasoning_content") or _text(message, "reasoning"),
            [_call_of(call, number) for number, call in enumerate(message.get("tool_calls") or ())],
            _stop_string(choice),
            *_counts(completion.get("usage")),
        )
    except (TypeError, LookupError, AttributeError) as error:
        raise UnreadableError(f"{type(error).__name__}: {error}") from None
    return answer, _FINISH_REASONS[reason]


def _text(message: Mapping[str, Any], name: str) -> str | None:
    value = message.get(name)
    if isinstance(value, list):  # parts, as some servers write them
        value = "".join(part["text"] for part in value if part.get("type") == "text")
    if not (value is None or isinstance(value, str)):
        raise UnreadableError(f"{name} is a {type(value).__name__}")
    return None if value is None else whole(value)


def _call_of(call: Mapping[str, Any], number: int) -> ChatToolCall:
    function = call["function"]
    return ChatToolCall(
        whole(str(call.get("id") or f"call_{number}")),
        whole(str(function["name"])),
        _arguments(function["arguments"] or {}),
    )


def _arguments(given: Any) -> str:
    """Return arguments as JSON text, even if a server sends an object."""
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    try:
        decoded = json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return whole(text)
    # # Escapes can stand for lone surrogates too, which would appear when the text is decoded.
    return whole(text) if whole(decoded) == decoded else whole(decoded)


def _stop_string(choice: Mapping[str, Any]) -> str | None:
    """Return the stop string that vLLM or SGLang reports. A number is a token id and is ignored."""
    found = choice.get("stop_reason", choice.get("matched_stop"))
    return whole(found) if isinstance(found, str) and found else None


def _counts(usage: Any) -> tuple[int | None, int | None]:
    """Return the numbers of tokens of the answer and of the prompt."""
    if not isinstance(usage, Mapping):
        return None, None
    counts = [usage.get(name) for name in ("completion_tokens", "prompt_tokens")]
    answer, prompt = (count if isinstance(count, int) and count >= 0 else None for count in counts)
    return answer, prompt


logger = logging.getLogger(__name__)

SECTION = "generation.endpoint"
_LARGEST_BYTES = 64 << 20
_SHOWN_CHARS = 300
_OF_THE_RUN = frozenset((401, 402, 404, 405))
"""Status codes that every request of the run would get, such as for a wrong key, model or path, or a lack of money."""
_BOUNDS = ("max_tokens", "max_completion_tokens")
"""Fields that limit the number of an answer's tokens."""
_FULL = (
    "context length",
    "context_length",
    "context window",
    "maximum length",
    "too many tokens",
    "prompt is too long",
)
"""Parts of error texts by which servers report that a conversation exceeds the model's context."""


@dataclass
class RequestCounts:
    """Counts of requests and answers."""

    requests: int = 0
    """Number of requests that were sent."""
    repeated: int = 0
    """Number of requests that were repeated after a failure."""
    answers: int = 0
    """Number of answers that arrived."""
    without_answer: int = 0
    """Number of conversations without an answer, although they fit into the context."""
    refused: int = 0
    """Number of these conversations whose request was refused and would be refused again."""
    last_error: str = ""
    """Error of the last conversation without an answer."""


class ChatModel(GenerationInterface):
    """The model of an OpenAI-compatible endpoint, for one event loop.

    Args:
        tokenizer: Tokenizer that encodes answers for the message log.

    Raises:
        ConfigError: The environment variable of the key is not set.
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
        """Return the answer to a request (`GenerationInterface.generate`).

        Raises:
            NoAnswerError: There is no answer to this request after all attempts.
            EndpointUnusableError: The endpoint refuses every request of the run.
            DataError: A message has content that is not text.
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
        """Log the counts of requests. Connections stay open until the event loop ends."""
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
        """Return an answer. If necessary, send a second request without a token limit.

        A server may refuse a prompt together with `max_tokens`, although a shorter answer would fit. The request is
        then sent again without `max_tokens` (or the field that replaces it for reasoning models), and the answer ends
        at the limit of the context, as with the library's own engines.
        """
        unbounded = {name: value for name, value in body.items() if name not in _BOUNDS}
        try:
            return await self._attempts(body)
        except NoAnswerError as error:
            if not error.is_too_long or len(unbounded) == len(body):
                raise
        return await self._attempts(unbounded)

    async def _attempts(self, body: Mapping[str, Any]) -> tuple[ChatAnswer, FinishReason]:
        try:
            return await ask_again(partial(self._ask, body), self._config, self._count_repetition)
        except EndpointError as error:
            if not error.may_pass:
                raise _refusal(error) from None
            raise NoAnswerError(str(error)) from None

    def _count_repetition(self) -> None:
        self.counts.repeated += 1

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


def connection_to(
    config: ModelEndpointConfig, timeout_s: float | None = None, section: str = SECTION, user: str = "the evaluation"
) -> EndpointConnection:
    """Return a connection to an endpoint.

    Args:
        timeout_s: Time limit of one request in seconds. If None, the limit of the section.
        section: Dotted key of the endpoint's section, for errors.
        user: Part of the run that uses the endpoint, for errors.

    Raises:
        ConfigError: The environment variable of the key is not set.
    """
    return EndpointConnection(
        "the model's endpoint",
        config.base_url,
        key_of(config.api_key_env, f"{section}.api_key_env", user),
        timeout_s or config.timeout_s,
        f"{section}.timeout_s",
        config.max_concurrent_requests,
        _LARGEST_BYTES,
    )


def _refusal(error: EndpointError) -> NoAnswerError | EndpointUnusableError:
    """Return the error of a refused request, which ends either the run or only the request's sample."""
    if error.status in _OF_THE_RUN:
        return EndpointUnusableError(
            f"{error}\nCheck {SECTION}.model, base_url and api_key_env. With eval.save_path the same command continues."
        )
    text = str(error).lower()
    is_too_long = error.status in (400, 413, 422) and any(words in text for words in _FULL)
    return NoAnswerError(str(error), is_too_long=is_too_long, is_refused=True)
