"""Renders chats to text with the tokenizer's chat template; all chats become text here.

Invariant: special tokens come from the chat template, so none is doubled; they come from texts only where they are not
quoted (`control_tokens`). A template gets each message in the form that it can write (`template_form`).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jinja2

from nemo_rl.data.interfaces import Message, TokenizerType
from nemo_rl.data.messages.template_form import for_template
from nemo_rl.utils.errors import DataError


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
            for_template(messages, tokenizer),
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


def bind_template_kwargs(tokenizer: TokenizerType, kwargs: Mapping[str, Any]) -> None:
    """Pass variables to the chat template in every chat that the tokenizer renders from now on."""
    bound = partial(tokenizer.apply_chat_template, **kwargs)
    tokenizer.apply_chat_template = bound  # type: ignore[method-assign]


def template_kwargs_of(tokenizer: TokenizerType) -> dict[str, Any]:
    """Return the variables that `bind_template_kwargs` has given to a tokenizer."""
    bound: Any = tokenizer.apply_chat_template
    return dict(bound.keywords) if isinstance(bound, partial) else {}
