"""Load a tokenizer as configured in `policy.tokenizer`.

Invariant: a loaded tokenizer always has a pad token and renders chats as configured.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer

from nemo_rl.config import TokenizerConfig
from nemo_rl.data.images.families import image_family
from nemo_rl.data.images.messages import bind_images, template_content
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.data.messages.encoding import bind_template_kwargs
from nemo_rl.files.hub_download import described_source, one_download
from nemo_rl.files.regular_file import read_text, require_regular_files
from nemo_rl.files.trusted_code import ADVICE, is_refused, may_run
from nemo_rl.host.processes import call_in_child
from nemo_rl.utils.errors import ConfigError, DeadlineExceededError

logger = logging.getLogger(__name__)

TEMPLATE_LIMIT_S = 10.0
"""Time limit in seconds within which a chat template must render a few short chats."""
_TEMPLATE_MEMORY_MB = 512
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
_CALL = {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": {}}}
_ASKED: list[dict[str, Any]] = [{"role": "system", "content": "RULES"}, {"role": "user", "content": "QUESTION"}]
_MORE_CHATS: list[list[dict[str, Any]]] = [
    _ASKED,
    [*_ASKED, {"role": "assistant", "content": "ANSWER"}, {"role": "user", "content": "ANOTHER"}],
    [
        *_ASKED,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "f", "tool_call_id": "call12345", "content": "RESULT"},
    ],
    _ASKED[1:] * 50,
]
"""Chats that a chat template must render before it is used."""

PASSTHROUGH_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Chat template that writes only the contents of messages."""


def get_tokenizer(
    tokenizer_config: TokenizerConfig | Mapping[str, Any],
    get_processor: bool = False,
    *,
    section: str = "policy",
) -> TokenizerType:
    """Load the tokenizer and set its chat template and pad token.

    Args:
        tokenizer_config: `name` is a local folder or a hub id. `chat_template` is "default" (the tokenizer's own
            template), None (contents of messages only), the path of a `*.jinja` file, or the text of a template.
            `chat_template_kwargs` are passed to every `apply_chat_template` call; a call's own arguments override them.
            A dict is checked and completed with defaults.
        get_processor: Whether the tokenizer reads images, as with `use_processor`.
        section: Section of the configuration that names the model, for messages.

    Raises:
        ConfigError: The tokenizer or the template file cannot be loaded, the template does not end or leaves out the
            messages, there is neither a pad nor an end-of-sequence token, or the model's images cannot be read.
    """
    tokenizer_config = TokenizerConfig.of(tokenizer_config)
    tokenizer = _load(tokenizer_config.name, section)
    if get_processor or tokenizer_config.use_processor:
        family = image_family(tokenizer, tokenizer_config.name, tokenizer_config.processor_kwargs, section)
        bind_images(tokenizer, family)
    _set_chat_template(tokenizer, tokenizer_config.chat_template, tokenizer_config.name, section)
    if tokenizer_config.chat_template_kwargs:
        bind_template_kwargs(tokenizer, tokenizer_config.chat_template_kwargs)
    _require_messages(tokenizer, section)
    ensure_pad_token(tokenizer, tokenizer_config.name)
    return tokenizer


def load_tokenizer(name: str | Path) -> TokenizerType:
    """Load a tokenizer as it is in its files. Code of its folder runs only if the configuration says so (`may_run`).

    Args:
        name: local folder, hub id, or `owner/name@COMMIT`.

    Raises:
        OSError, ValueError: it cannot be loaded.
    """
    source = described_source(str(name))
    if not may_run(source):
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    with one_download(Path(source).name):  # transformers copies the code into a folder that processes share
        return AutoTokenizer.from_pretrained(source, trust_remote_code=True)


def _load(name: str, section: str) -> TokenizerType:
    try:
        require_regular_files(name)
        return load_tokenizer(name)
    except (OSError, ValueError) as error:
        own = f"\n{ADVICE}" if is_refused(error) else ""
        place = "folder" if Path(name).expanduser().is_dir() else "local folder or hub id"
        raise ConfigError(
            f"{section}.tokenizer.name={name!r}: no tokenizer could be loaded from this {place}. "
            f"It needs tokenizer.json, or vocabulary files with tokenizer_config.json. "
            f"The loader said: {error}{own}"
        ) from error


def _set_chat_template(tokenizer: TokenizerType, chat_template: str | None, name: str, section: str) -> None:
    place = f"{section}.tokenizer.chat_template"
    if chat_template is None:
        tokenizer.chat_template = PASSTHROUGH_TEMPLATE
    elif chat_template == "default":
        if tokenizer.chat_template is None:
            logger.warning(
                "Tokenizer %s has no chat template of its own; chats cannot be rendered until "
                "%s is set (null sends the bare text).",
                name,
                place,
            )
    elif chat_template.endswith(".jinja"):
        try:
            tokenizer.chat_template = read_text(chat_template)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{place}={chat_template!r} cannot be read: {error}. "
                'Give a *.jinja file, a template text, null or "default".'
            ) from error
    else:
        tokenizer.chat_template = chat_template


def _require_messages(tokenizer: TokenizerType, section: str) -> None:
    """Refuse a chat template that does not end, needs much memory, or renders all questions to the same text.

    The author of a model's files may be unknown. Therefore its template first renders short chats in a process with
    limits. Errors that the template itself raises are reported later, together with the data.
    """
    if tokenizer.chat_template is None:
        return
    place = f"{section}.tokenizer.chat_template"
    try:
        same = call_in_child(
            lambda: _text_of_any_question(tokenizer),
            seconds=TEMPLATE_LIMIT_S,
            memory_mb=_TEMPLATE_MEMORY_MB,
            what=f"{place} with a chat of a few words",
        )
    except DeadlineExceededError as error:
        raise ConfigError(f"{error}. It may loop forever.") from None
    except MemoryError as error:
        raise ConfigError(f"{error}. It writes far more than a chat; use a template that you trust.") from None
    if same is not None:
        raise ConfigError(
            f"{place} leaves out what the user says: it renders any message as "
            f"{same!r}. Let it write message['content'], or set it to null to send the bare text."
        )


def _text_of_any_question(tokenizer: TokenizerType) -> str | None:
    """Render short chats of all kinds. Return the start of a text that is equal for two questions."""
    questions = [[{"role": "user", "content": question}] for question in ("QUESTION", "ANOTHER")]
    texts = [_rendered(tokenizer, chat, False) for chat in questions]
    for chat in (questions[0], *_MORE_CHATS):
        for tools in (None, [_TOOL]):
            _rendered(tokenizer, chat, True, tools)
    return texts[0][:80] if texts[0] is not None and texts[0] == texts[1] else None


def _rendered(
    tokenizer: TokenizerType, chat: list[dict[str, Any]], opens_answer: bool, tools: list[Any] | None = None
) -> str | None:
    """Render a chat, or return None if the template refuses it."""
    try:
        messages = [{**message, "content": template_content(message["content"], tokenizer)} for message in chat]
        return str(
            tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=opens_answer)
        )
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return None


def ensure_pad_token(tokenizer: TokenizerType, name: str) -> None:
    """Use the end-of-sequence token as the pad token if the tokenizer has none.

    Raises:
        ConfigError: The tokenizer has neither token.
    """
    if tokenizer.pad_token is not None:
        return
    if tokenizer.eos_token is None:
        raise ConfigError(
            f"Tokenizer {name!r} has neither a pad token nor an end-of-sequence token; "
            "add one of them to its tokenizer_config.json."
        )
    tokenizer.pad_token = tokenizer.eos_token
    logger.info(
        "Tokenizer %s has no pad token; padding with its end-of-sequence token %r (id %d).",
        name,
        tokenizer.eos_token,
        tokenizer.eos_token_id,
    )


def ensure_distinct_pad_token(tokenizer: TokenizerType) -> None:
    """Set a pad token that differs from the end-of-sequence token.

    A sequence classifier finds the last token of a padded sequence by the padding after it. A sequence that ends with
    the pad token would therefore lose this token.

    Raises:
        ConfigError: The tokenizer has no other token to pad with.
    """
    if tokenizer.pad_token_id != tokenizer.eos_token_id:
        return
    added = [str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
    named = [token for token in added if "pad" in token.lower()]
    candidates = [*named, tokenizer.unk_token, tokenizer.bos_token]
    chosen = next((token for token in candidates if token and token != tokenizer.eos_token), None)
    if chosen is None:
        raise ConfigError(
            f"Tokenizer {tokenizer.name_or_path!r} pads with its end-of-sequence token {tokenizer.eos_token!r} and "
            "has no other token for it; a reward model needs one. Add a pad token to its tokenizer_config.json."
        )
    tokenizer.pad_token = chosen
    logger.info("Padding with %r (id %d), so that sequences keep their end.", chosen, tokenizer.pad_token_id)
