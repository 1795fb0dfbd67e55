"""Renders chats to text and encodes text to token ids; all prompts become tokens here.

Invariant: special tokens come from the chat template, so none is doubled; they come from texts only where they are not
quoted (`control_tokens`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import torch

from nemo_rl.data.interfaces import Message, TokenizerType
from nemo_rl.data.messages.content import with_texts
from nemo_rl.data.messages.control_tokens import control_tokens_of, is_marked
from nemo_rl.utils.errors import DataError

_CHARACTERS_PER_TOKEN = 8
_CUT_MARGIN = 512
"""A number of bytes above the length of the longest token of any vocabulary."""


def render_chat(
    messages: Sequence[Message],
    tokenizer: TokenizerType,
    *,
    add_generation_prompt: bool,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Render a chat to text with the tokenizer's chat template.

    Args:
        messages: Messages with `role` and `content`.
        tokenizer: Has the chat template.
        add_generation_prompt: Whether the header of the next assistant turn follows.
        tools: Function schemas that the chat offers.
        template_kwargs: Variables for the template; they replace those of `policy.tokenizer.chat_template_kwargs`.

    Raises:
        DataError: The tokenizer has no chat template, the template refuses these messages, or one of their parts
            is not text.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            f"tokenizer {tokenizer.name_or_path!r} has no chat template. Set "
            "policy.tokenizer.chat_template: null to send the bare text, a *.jinja file, or a "
            "template text."
        )
    optional: dict[str, Any] = ({} if tools is None else {"tools": tools}) | dict(template_kwargs or {})
    try:
        rendered = tokenizer.apply_chat_template(
            with_texts(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **optional,
        )
    except jinja2.TemplateError as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise DataError(
            f"the chat template of tokenizer {tokenizer.name_or_path!r} cannot render a chat "
            f"with the roles [{roles}]: {error}"
        ) from error
    return str(rendered)


def encode_text(text: str, tokenizer: TokenizerType, longest: int | None = None) -> torch.Tensor:
    """Encode rendered text to token ids [T] int64; add no special tokens.

    Args:
        text: Rendered text, with or without marks of `control_tokens`.
        tokenizer: The tokenizer.
        longest: Most tokens that the caller can use. Of a longer text only a prefix with more tokens than this may be
            encoded, because megabytes of text would take seconds and gigabytes of memory; None encodes all of it.
    """
    if longest is not None:
        # Cutting a token in the middle adds fewer tokens than the margin. If the prefix exceeds `longest` by more than
        # the margin, the whole text is too long as well.
        end = _CHARACTERS_PER_TOKEN * (longest + _CUT_MARGIN)
        while end < len(text):
            beginning = _encode(text[:end], tokenizer)
            if len(beginning) > longest + _CUT_MARGIN:
                return beginning
            end *= _CHARACTERS_PER_TOKEN
    return _encode(text, tokenizer)


def _encode(text: str, tokenizer: TokenizerType) -> torch.Tensor:
    if is_marked(text):
        return torch.tensor(control_tokens_of(tokenizer).encode(text), dtype=torch.int64)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)
