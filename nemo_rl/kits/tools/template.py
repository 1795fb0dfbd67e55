"""Check that a parser reads the calls that a chat template writes, without changing them.

A model learns from its template how to write calls. A parser for another format would find no call, and this could go
unnoticed, because rewards may still rise. Invariant: a run with tools starts only if tools, calls and outputs of tools
appear in the rendered chat, and the parser reads the calls.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl.data.interfaces import Message, TokenizerType
from nemo_rl.data.messages.encoding import encode_text, render_chat
from nemo_rl.kits.tools.vllm import CallParser, ToolCall, parser_names
from nemo_rl.utils.errors import ConfigError

_QUESTION: Message = {"role": "user", "content": "QUESTION"}
_PROBE = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Looks up a text.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
            "required": ["text", "count"],
        },
    },
}
_USUAL = (
    *("hermes", "qwen3_coder", "llama3_json", "mistral", "pythonic", "deepseek_v31", "deepseek_v3", "glm45"),
    *("kimi_k2", "minimax_m2", "granite", "phi4_mini_json", "xlam", "internlm", "jamba"),
)
"""Parsers that are tried first, with the most general ones at the beginning."""


@dataclass(frozen=True)
class RenderedCalls:
    """Calls as a chat template writes them."""

    text: str
    """Text of the assistant's turn, up to the token that ends the turn."""
    calls: list[ToolCall]
    opening: str
    """Text before the name of the first tool, for example `<tool_call>`."""


def response_text(token_ids: Sequence[int], tokenizer: TokenizerType) -> str:
    """Decode a response. Special tokens are kept, because some formats of calls use them, except those at the end."""
    ids, special = [int(token) for token in token_ids], set(tokenizer.all_special_ids)
    while ids and ids[-1] in special:
        ids.pop()
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str), "one sequence gives one text"
    return text


def choose_parser(
    name: str | None, tokenizer: TokenizerType, tools: Sequence[dict[str, Any]]
) -> tuple[CallParser, str]:
    """Return a parser that reads the calls of the chat template, and the text with which calls begin.

    Args:
        name: name of the parser, or None for the first parser that fits.
        tokenizer: tokenizer with the chat template.
        tools: function schemas that prompts offer.

    Raises:
        ConfigError: the template leaves out tools, calls or outputs of tools, or the parser does not read its calls.
    """
    rendered = rendered_calls(tokenizer, tools)
    offered = [*tools, _PROBE]
    if name is None:
        names = [*_USUAL, *(each for each in parser_names() if each not in _USUAL)]
        fitting = next((each for each in names if _reads(each, tokenizer, offered, rendered)), None)
        if fitting is None:
            raise ConfigError(
                f"no tool parser of vLLM reads the calls that the chat template of {tokenizer.name_or_path!r} writes: "
                f"{rendered.text!r}. Set policy.tokenizer.chat_template."
            )
        name = fitting
    parser = CallParser(name, tokenizer, tools)
    if not _reads(name, tokenizer, offered, rendered):
        fitting_names = [each for each in parser_names() if _reads(each, tokenizer, offered, rendered)]
        raise ConfigError(
            f"env.tools.tool_parser={name} does not read the calls that the chat template of "
            f"{tokenizer.name_or_path!r} writes: {rendered.text!r}. Parsers that do: "
            f"{', '.join(fitting_names) or 'none'}. Choose one of them, or null."
        )
    return parser, rendered.opening


def rendered_calls(tokenizer: TokenizerType, tools: Sequence[dict[str, Any]]) -> RenderedCalls:
    """Render a turn with two calls of a probe tool, whose arguments contain quotes and brackets.

    Raises:
        ConfigError: the chat template leaves out the tools, the calls or the outputs of tools.
    """
    calls = [
        ToolCall("probe_tool", {"text": f'say "{word}" {{1, [2]}}', "count": n}) for n, word in ((3, "a"), (4, "b"))
    ]
    written = [
        {"id": f"call0000{n}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for n, call in enumerate(calls)
    ]
    answer: Message = {"role": "assistant", "content": "", "tool_calls": written}
    offered = [*tools, _PROBE]
    where = f"the chat template of {tokenizer.name_or_path!r}"
    prompt = render_chat([_QUESTION], tokenizer, add_generation_prompt=True, tools=offered)
    missing = [name for name in (tool["function"]["name"] for tool in offered) if name not in prompt]
    if missing:
        raise ConfigError(
            f"{where} does not write the tools {', '.join(missing)} into the prompt, so the model cannot know them. "
            "Use a template for tools: policy.tokenizer.chat_template."
        )
    chat = render_chat([_QUESTION, answer], tokenizer, add_generation_prompt=False, tools=offered)
    added = chat[len(os.path.commonprefix([prompt, chat])) :]
    if not all(call.name in added for call in calls):
        raise ConfigError(f"{where} does not write the calls of an assistant (tool_calls). Set another template.")
    said = render_chat(
        [_QUESTION, {"role": "assistant", "content": "ANSWER"}, {"role": "tool", "content": "OBSERVATION"}],
        tokenizer,
        add_generation_prompt=True,
        tools=offered,
    )
    if "OBSERVATION" not in said:
        raise ConfigError(f"{where} leaves out messages of the role 'tool'. Set another template.")
    text = response_text(encode_text(_without_end(added, tokenizer), tokenizer).tolist(), tokenizer)
    return RenderedCalls(text, calls, _opening(text.partition("probe_tool")[0]))


def looks_like_a_call(text: str, opening: str, names: Mapping[str, Any]) -> bool:
    """Return whether a response without readable calls tries to call a tool.

    Args:
        text: the response.
        opening: text with which calls begin. If it is a tag such as `<tool_call>`, the tag alone shows a call. Any
            other text shows a call only if the name of a tool follows it.
        names: tools by name.
    """
    if not opening:
        return False
    if len(opening) > 2 and opening[0] in "<[" and opening[-1] in ">]":
        return opening in text
    return any(opening + name in text for name in names)


def _opening(before_name: str) -> str:
    """Return the beginning of a call: the first tag before the tool name or, without a tag, all text before it."""
    stripped = before_name.lstrip()
    if stripped.startswith("<") and ">" in stripped:
        tags = [part + ">" for part in stripped.split(">")[:-1]]
        return next((tag[tag.index("<") :] for tag in tags if "<" in tag and "think" not in tag), stripped)
    return stripped


def _without_end(added: str, tokenizer: TokenizerType) -> str:
    """Return a rendered turn without the token that ends the turn."""
    ends = [token for token in (tokenizer.eos_token, "<|im_end|>", "<|eot_id|>") if token and token in added]
    return added[: min((added.index(token) for token in ends), default=len(added))]


def _reads(name: str, tokenizer: TokenizerType, tools: Sequence[dict[str, Any]], rendered: RenderedCalls) -> bool:
    try:
        return CallParser(name, tokenizer, tools).calls(rendered.text) == rendered.calls
    except ConfigError:
        return False
