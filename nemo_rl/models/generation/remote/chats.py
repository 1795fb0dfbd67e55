"""Represent conversations with a model that does not take token ids: prompts as messages, answers, and a tokenizer.

Rollouts keep messages as token ids, but the model's tokenizer is not available here. With the tokenizer of this module,
token ids are the bytes of the texts. They can be decoded exactly, but their number is not the number of the model's
tokens.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemo_rl.data.interfaces import Message, TokenizerType


def whole(text: str) -> str:
    """Replace lone surrogates with "?". JSON can contain them, but tokenizers and files cannot."""
    return text.encode("utf-8", errors="replace").decode()


@dataclass(frozen=True)
class ChatInput:
    """A conversation to continue."""

    messages: Sequence[Message]
    """Messages in OpenAI's form, the newest one last."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Function schemas in OpenAI's form."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template."""
    may_call: bool = True
    """Whether the answer may call the tools."""
    forced_tool: str | None = None
    """Name of the tool that the answer must call. "" means any tool. If None, the model decides."""
    calls_once: bool = False
    """Whether an answer that must call a tool may have only one call."""


@dataclass(frozen=True)
class ChatToolCall:
    """A tool call of an answer."""

    id: str
    """Id of the call, assigned by the server."""
    name: str
    arguments: str
    """Arguments as JSON text. If the model wrote invalid JSON, its text is kept."""

    @property
    def as_text(self) -> str:
        """Return the call in the form that most chat templates use (the parser "hermes")."""
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            arguments = self.arguments
        call = {"name": self.name, "arguments": arguments}
        return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


@dataclass(frozen=True)
class ChatAnswer:
    """An answer in the form in which the server sends it."""

    content: str
    """Text without reasoning and tool calls. Empty if the answer contains only these."""
    reasoning: str | None = None
    """Text of the reasoning. None if the server does not separate it."""
    tool_calls: Sequence[ChatToolCall] = ()
    """Calls that the server has parsed."""
    stop_string: str | None = None
    """Stop string that ended the answer, which is not in the content. None if the server does not report it."""
    num_tokens: int | None = None
    """Number of tokens of the answer, including reasoning and calls. None if the server does not count them."""
    num_prompt_tokens: int | None = None
    """Number of tokens of the prompt. None if the server does not count them."""

    @property
    def text(self) -> str:
        """Return all that an environment reads: content, stop string, and calls as text."""
        return "\n".join(
            [*filter(None, [self.content + (self.stop_string or "")]), *(c.as_text for c in self.tool_calls)]
        )

    @property
    def fields(self) -> Message:
        """Return more fields of the answer's message for a log. They include `num_tokens`, which may be None."""
        found: Message = {"num_tokens": self.num_tokens}
        if self.tool_calls:
            found["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
            found["spoken"] = self.content
        if self.reasoning is not None:
            found["reasoning_content"] = self.reasoning
        return found


CHAT_TEMPLATE = """\
{%- if tools %}{{ '[tools]\\n' }}{% for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}{% endif -%}
{%- for message in messages %}{{ '[' + message['role'] + ']\\n' + message['content'] }}
{%- for call in message['tool_calls'] or [] %}
{{- '\\n' if message['content'] or not loop.first }}
{{- '<tool_call>\\n' + (call['function'] | tojson) + '\\n</tool_call>' }}
{%- endfor %}{{ '\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '[assistant]\\n' }}{% endif -%}
"""
"""Template for people who read prompts in records. Servers get messages instead."""


def text_tokenizer() -> TokenizerType:
    """Return the tokenizer. It has no special tokens, so no text can contain one."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(bytes_)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=CHAT_TEMPLATE, name_or_path="text")
