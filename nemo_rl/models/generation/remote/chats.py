"""Conversations with a model that does not take token ids: a prompt as messages, an answer, a tokenizer.

A tokenizer for conversations with a model whose tokenizer is not here. Rollouts keep messages as token ids. With this
tokenizer these are the bytes of the texts, so they can be decoded exactly, but their numbers are not those of the
model's tokens.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemo_rl.data.interfaces import Message, TokenizerType


def whole(text: str) -> str:
    """Replace lone surrogates by "?", because JSON can carry them, but tokenizers and files cannot."""
    return text.encode("utf-8", errors="replace").decode()


@dataclass(frozen=True)
class ChatInput:
    """A conversation to continue."""

    messages: Sequence[Message]
    """Messages in OpenAI's form, the newest last."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Function schemas in OpenAI's form."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template."""
    may_call: bool = True
    """False forbids calls of the tools."""
    forced_tool: str | None = None
    """Name of the tool that the answer has to call, an empty text for any; None: the model decides."""
    calls_once: bool = False
    """Whether a forced answer has one call only."""


@dataclass(frozen=True)
class ChatToolCall:
    """A tool call of an answer."""

    id: str
    """Id that the server gave."""
    name: str
    arguments: str
    """JSON text, as the model wrote it where it is no valid JSON."""

    @property
    def as_text(self) -> str:
        """The call in the form that most chat templates have (the parser "hermes")."""
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            arguments = self.arguments
        call = {"name": self.name, "arguments": arguments}
        return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


@dataclass(frozen=True)
class ChatAnswer:
    """An answer as the server gives it."""

    content: str
    """Text without reasoning and tool calls; empty if there are only those."""
    reasoning: str | None = None
    """None if the server separates none."""
    tool_calls: Sequence[ChatToolCall] = ()
    """Calls that the server has parsed."""
    stop_string: str | None = None
    """The stop string that ended it, which is not in the content; None if the server does not say."""
    num_tokens: int | None = None
    """Tokens of the answer, with reasoning and calls; None if the server does not count them."""
    num_prompt_tokens: int | None = None
    """Tokens of the prompt; None if the server does not count them."""

    @property
    def text(self) -> str:
        """All that an environment reads: content, stop string, and calls as text."""
        return "\n".join(
            [*filter(None, [self.content + (self.stop_string or "")]), *(c.as_text for c in self.tool_calls)]
        )

    @property
    def fields(self) -> Message:
        """Further fields of its message in a log, always with `num_tokens`, which may be None."""
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
"""For people who read the prompts of records; servers get messages."""


def text_tokenizer() -> TokenizerType:
    """Return the tokenizer, which has no special tokens, so that no text can hold one."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(bytes_)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=CHAT_TEMPLATE, name_or_path="text")
