"""Find the images in messages, render them with a chat template, and expand their placeholders.

    load_images        reads the file of each image part; other parts stay
    content.with_texts joins the parts of a message to a text, with a mark for each image
    template_parts     divides such a text for the chat template, which writes a placeholder for each image
    expanded           replaces each placeholder by the tokens of its image

Marks never leave the process: a `Chat` holds parts. Invariant: the n-th placeholder of a rendered chat belongs to the
n-th image of its messages, and a chat with another number of placeholders is refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
import torch
from torch import Tensor

from nemo_rl.config.schema.data import ImagesConfig
from nemo_rl.data.images.families import ImageFamily
from nemo_rl.data.images.image import Image, load_image
from nemo_rl.data.images.rows import RowImages
from nemo_rl.data.interfaces import Message, TokenizerType
from nemo_rl.data.messages.content import IMAGE_MARK
from nemo_rl.data.model_rows import RowInputs
from nemo_rl.utils.errors import DataError

_FAMILY = "nemo_rl_images"
_PROBE = "PROBE7Q"
_MODEL_TURNS = frozenset(("assistant", "system", "developer"))


def bind_images(tokenizer: TokenizerType, family: ImageFamily) -> None:
    """Let a tokenizer render messages with images of a family."""
    setattr(tokenizer, _FAMILY, family)


def images_of(tokenizer: TokenizerType) -> ImageFamily | None:
    """Return the family that `bind_images` has set, or None for a text tokenizer."""
    family: ImageFamily | None = getattr(tokenizer, _FAMILY, None)
    return family


def load_images(messages: Iterable[Message], tokenizer: TokenizerType, limits: ImagesConfig) -> list[Message]:
    """Read the images of messages, if the tokenizer's model reads images.

    Returns:
        The messages, in which image parts hold an `Image`. Images that were already read stay.

    Raises:
        DataError: an image cannot be used, or is in the turn of a model.
    """
    if images_of(tokenizer) is None:
        return list(messages)
    return [_loaded(message, limits) for message in messages]


def _loaded(message: Message, limits: ImagesConfig) -> Message:
    content = message.get("content")
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return message
    role = str(message.get("role"))
    if role in _MODEL_TURNS:
        raise DataError(f"a message of the role {role!r} has an image; only user, tool and environment turns may")
    return {**message, "content": [_loaded_part(part, limits) if _is_image(part) else part for part in content]}


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _loaded_part(part: Mapping[str, Any], limits: ImagesConfig) -> dict[str, Any]:
    given = part.get("image")
    return {"type": "image", "image": given if isinstance(given, Image) else load_image(part, limits)}


def images_in(messages: Iterable[Message]) -> list[Image]:
    """Return the images of messages in order."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part["image"] for part in parts if _is_image(part) and isinstance(part["image"], Image)]


def with_parts(messages: Sequence[Message], images: Sequence[Image]) -> list[Message]:
    """Return messages with parts in place of texts with marks (`content.with_texts`).

    Raises:
        DataError: the messages have another number of marks than there are images.
    """
    remaining = list(images)
    made = []
    for message in messages:
        text = message.get("content")
        if not isinstance(text, str) or IMAGE_MARK not in text:
            made.append(message)
            continue
        parts = template_parts(text)
        for part in parts:
            if part["type"] == "image":
                if not remaining:
                    raise DataError("a prompt repeats an image; its prompt_file must have one {}")
                part["image"] = remaining.pop(0)
        made.append({**message, "content": parts})
    if remaining:
        raise DataError(f"a prompt leaves out {len(remaining)} of {len(images)} images")
    return made


def template_parts(text: str) -> list[dict[str, Any]]:
    """Divide a text with marks into parts for a chat template."""
    first, *others = text.split(IMAGE_MARK)
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}] if first else []
    for other in others:
        parts.append({"type": "image"})
        if other:
            parts.append({"type": "text", "text": other})
    return parts


def template_content(text: Any, tokenizer: TokenizerType) -> Any:
    """Return the content of a message in the form that the tokenizer's chat template reads: a text or parts."""
    if not isinstance(text, str) or images_of(tokenizer) is None:
        return text
    if IMAGE_MARK in text:
        return template_parts(text)
    return [{"type": "text", "text": text}] if _reads_parts_only(tokenizer, str(tokenizer.chat_template)) else text


@lru_cache(maxsize=8)
def _reads_parts_only(tokenizer: TokenizerType, template: str) -> bool:
    """Return whether the chat template loses a content that is a text, as those of Idefics3 do."""
    try:
        return _PROBE not in str(tokenizer.apply_chat_template([{"role": "user", "content": _PROBE}], tokenize=False))
    except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return True


def expanded(pieces: Sequence[Tensor], images: Sequence[Image], tokenizer: TokenizerType) -> list[Tensor]:
    """Replace the placeholders in the token ids of a chat by the tokens of its images.

    Args:
        pieces: token ids of the parts of a chat in order, each `[n]` int64.
        images: the images of the chat in order.

    Raises:
        DataError: the numbers of placeholders and images differ.
    """
    family = images_of(tokenizer)
    if family is None:
        return list(pieces)
    found = sum(int((piece == family.placeholder).sum()) for piece in pieces)
    if found != len(images):
        raise DataError(
            f"a chat with {len(images)} images has {found} placeholders (token {family.placeholder}) after rendering; "
            "its texts must not contain the placeholder, and the chat template must write one for each image"
        )
    remaining = iter(images)
    return [_expanded(piece, remaining, family) for piece in pieces]


def _expanded(piece: Tensor, remaining: Iterable[Image], family: ImageFamily) -> Tensor:
    if not (piece == family.placeholder).any():
        return piece
    ids: list[int] = []
    images = iter(remaining)
    for token in piece.tolist():
        ids += family.tokens_of(next(images)) if token == family.placeholder else [token]
    return torch.tensor(ids, dtype=torch.int64)


def inputs_of(images: Sequence[Image], tokenizer: TokenizerType) -> RowInputs | None:
    """Return the further inputs of a row with these images, or None for a text tokenizer."""
    family = images_of(tokenizer)
    return None if family is None else RowImages(family, tuple(images)).row_inputs()
