"""Read the reasoning, the tool calls and the text of an answer from its tokens.

Invariant: parsers get the text with its special tokens, and programs get the text without special tokens.
"""

import asyncio
import hashlib
import json
import logging
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.agents.endpoint.calls import AnsweredToolCall, CallError, CallRequest
from nemo_rl.agents.endpoint.forms import read_calls
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.kits.tools.template import choose_parser, response_text
from nemo_rl.kits.tools.vllm import CallParser, ReasoningReader, load_parsers
from nemo_rl.models.generation.remote.chats import ChatAnswer, ChatInput
from nemo_rl.models.generation.responses import sampled_text
from nemo_rl.utils.errors import NoAnswerError

ID_LENGTH = 9
"""Length of ids. Some chat templates require this length for the ids of tool calls."""
_DIGITS = string.digits + string.ascii_lowercase
_MOST_PARSERS = 64
"""Largest number of parsers that are kept. Samples with different tools need different parsers."""


@dataclass(frozen=True)
class ReadAnswer:
    """Parts of an answer, with the names of the attributes of `CallAnswer`."""

    content: str
    reasoning: str | None = None
    tool_calls: Sequence[AnsweredToolCall] = ()
    stop_string: str | None = None


@dataclass
class AnswerReader:
    """Read the answers to the programs of one environment.

    Args:
        tokenizer: tokenizer that decodes the answers.
        tool_parser: name of one of vLLM's parsers, or None for the first one that reads the calls of the chat template.
        reasoning_parser: name of one of vLLM's parsers, or None to leave the reasoning in the content.
        plugins: Python files that register parsers with vLLM.

    Raises:
        ConfigError: there is no such parser, or it does not read the calls that the chat template writes.
    """

    tokenizer: TokenizerType
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    plugins: Sequence[str] = ()
    _parsers: dict[str, CallParser] = field(default_factory=dict, init=False)
    """Parsers by the tools that they read, as JSON."""
    _name: str | None = field(default=None, init=False)
    _choosing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _reasoning: ReasoningReader | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for file in self.plugins:
            load_parsers(file)
        if self.reasoning_parser is not None:
            self._reasoning = ReasoningReader(self.reasoning_parser, self.tokenizer)

    async def prepare(self, request: CallRequest) -> None:
        """Choose the parser for the tools of a request, without blocking the event loop. A second call does nothing.

        Raises:
            ConfigError: no parser reads the calls that the chat template writes.
        """
        if self._name is None and _parses_tools(request):
            async with self._choosing:
                if self._name is None:
                    self._name = await asyncio.to_thread(self._choose)

    def read(self, token_ids: list[int], request: CallRequest, seed: int) -> ReadAnswer:
        """Read the tokens of an answer.

        Args:
            request: the request that was answered.
            seed: seed of the answer, from which the ids of its tool calls are derived.
        """
        parses_tools = _parses_tools(request)
        if not parses_tools and request.forced_tool is None and self._reasoning is None:
            text, stop = before_stop(sampled_text(self.tokenizer, token_ids), request.stop)
            return ReadAnswer(text, stop_string=stop)
        text, stop = before_stop(response_text(token_ids, self.tokenizer), request.stop)
        reasoning, text = self._split(text, request)
        if request.forced_tool is not None:
            content = self._shown(text)
            calls = read_calls(content, request)
            content = content if calls is None else ""
        elif parses_tools:
            # The reasoning parser has already removed the thinking from the text.
            variables = request.template_kwargs if self._reasoning is None else None
            content, calls = self._parser(request.tools).content_and_calls(text, variables)
            content = self._shown(content)
        else:
            content, calls = self._shown(text), None
        answered = [
            AnsweredToolCall(short_id("tool", seed, number), name, arguments)
            for number, (name, arguments) in enumerate(calls or ())
        ]
        return ReadAnswer(content, reasoning, answered, stop)

    def _split(self, text: str, request: CallRequest) -> tuple[str | None, str]:
        """Return the reasoning of an answer (None if it has none) and the rest of the answer."""
        if self._reasoning is None:
            return None, text
        reasoning, rest = self._reasoning.split(text, request.template_kwargs)
        has_form = request.grammar is not None or request.forced_tool is not None
        # The form may leave no room for reasoning, but parsers read an answer without an end of thinking as reasoning.
        return (None, text) if has_form and not rest else (reasoning, rest)

    def _parser(self, tools: Sequence[Any]) -> CallParser:
        """Return the parser for the given tools."""
        key = json.dumps(list(tools), sort_keys=True, default=repr)
        if key not in self._parsers:
            assert self._name is not None, "prepare has chosen it"
            if len(self._parsers) >= _MOST_PARSERS:
                self._parsers.pop(next(iter(self._parsers)))
            self._parsers[key] = CallParser(self._name, self.tokenizer, [dict(tool) for tool in tools])
        return self._parsers[key]

    def _choose(self) -> str:
        """Return the name of a parser, after checking it against the chat template."""
        return choose_parser(self.tool_parser, self.tokenizer, [])[0].name

    def _shown(self, text: str) -> str:
        """Return a text without special tokens."""
        for token in self.tokenizer.all_special_tokens:
            text = text.replace(token, "")
        return text


def _parses_tools(request: CallRequest) -> bool:
    """Return whether tool calls are parsed in the answer to a request."""
    return bool(request.tools) and request.reads_tool_calls and request.forced_tool is None


def before_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return the text before the first stop string, and that stop string, or None if the text has none."""
    found = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    if not found:
        return text, None
    place, stop = min(found)
    return text[:place], stop


def short_id(*parts: str | int) -> str:
    """Derive an id of `ID_LENGTH` letters and digits from the given parts."""
    number = int.from_bytes(hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest(), "big")
    digits = []
    for _ in range(ID_LENGTH):
        number, digit = divmod(number, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(digits)


logger = logging.getLogger(__name__)


def forwarded(request: CallRequest) -> ChatInput:
    """Return a request as a conversation for the server that has the model.

    Raises:
        CallError: the request needs the model's tokens, which only the server has.
    """
    asked = (
        ("prompt", request.prompt is not None, "Send messages to /v1/chat/completions."),
        ("continue_final_message", request.continues_last, "Let the last message be one of another role."),
        ("logprobs", request.reads_token_texts, "Leave it out."),
    )
    for parameter, is_asked, advice in asked:
        if is_asked:
            raise CallError(
                400,
                f"{parameter} needs the tokens of the model, but this run evaluates a model of another server "
                f"(generation.endpoint), which is asked with messages. {advice}",
                "unsupported_parameter",
                parameter,
            )
    return ChatInput(
        [{**message, "content": message.get("content") or ""} for message in request.messages],
        request.tools,
        request.template_kwargs,
        may_call=request.reads_tool_calls,
        forced_tool=request.forced_tool,
        calls_once=request.calls_once,
    )


def read_forwarded(answer: ChatAnswer, request: CallRequest) -> ReadAnswer:
    """Return the parts of an answer that the server gave."""
    content, stop = before_stop(answer.content + (answer.stop_string or ""), request.stop)
    calls = [AnsweredToolCall(call.id, call.name, call.arguments) for call in answer.tool_calls]
    return ReadAnswer(content, answer.reasoning, calls, stop)


def refusal(error: NoAnswerError) -> CallError:
    """Return the error that a program gets in place of an answer. It leaves out the server's address."""
    logger.info("A call of a program has no answer: %s", error)
    if error.is_too_long:
        message = "The messages do not fit into the context length of the model."
        return CallError(400, message, "context_length_exceeded", "messages")
    if error.is_refused:
        return CallError(400, "The server of the model refuses this request; it would again.", "invalid_request")
    return CallError(502, "The server of the model gave no answer, after all attempts.", "no_answer")
