"""Read the content of a message, which is a text or a list of typed parts.

Invariant: all code uses `content_text` to read the text of a content. This function refuses parts that are neither text
nor an image that was read (`images.image.Image`).
"""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from nemo_rl.config import DataConfig
from nemo_rl.config.schema.algorithms.evaluation import EvalDataConfig
from nemo_rl.config.schema.data import ImagesConfig
from nemo_rl.data.images.image import Image
from nemo_rl.utils.errors import DataError

TOOL_ROLES = frozenset(("environment", "function", "ipython", "tool"))
"""Roles whose texts come from programs, which may pass on texts of other sources."""


@dataclass(frozen=True)
class TextRules:
    """Rules for contents of messages, and limits on the images that environments and programs add.

    Texts may be encoded as ordinary text even if they contain control tokens such as `<|im_end|>`.
    """

    rows: bool = False
    """Whether texts in rows of data are encoded as ordinary text. Control tokens that the vocabulary does not mark as
    special, such as Qwen's `<think>`, are still encoded as tokens."""
    tools: bool = True
    """Whether texts of environments, and texts of `TOOL_ROLES` in rows, are encoded as ordinary text."""
    images: ImagesConfig = field(default_factory=ImagesConfig.build)
    """Limits on the files and pixels of images."""


def text_rules(data: DataConfig | EvalDataConfig) -> TextRules:
    """Return the rules of a `data` section."""
    rows, tools = data.control_tokens_in_rows, data.control_tokens_from_tools
    return TextRules(rows=rows == "as_text", tools=tools == "as_text", images=data.images)


class TextPart(TypedDict):
    """A part of a message that is text."""

    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    """A part of a message that is an image (`images.image.load_image`).

    Without `policy.is_vlm`, the library's processors refuse it. A user's processor can convert it to an input of the
    row (`data.model_rows`).
    """

    type: Literal["image"]
    image: Any


type Content = str | list[TextPart | ImagePart]


IMAGE_MARK = "".join(chr(0xF0000 + secrets.randbelow(0xFFFD)) for _ in range(6))
"""Text that stands for an image while messages are rendered. No text contains it by chance."""


def content_text(content: Any, what: str = "the content of a message", image: str = "<image>") -> str:
    """Return the text of a content. The texts of its parts are joined.

    Args:
        what: Name of the content, for errors.
        image: Text for each image that was read.

    Raises:
        DataError: The content is neither a text nor a list of parts, or a part is neither text nor a read image.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{what} is {type(content).__name__}, neither text nor a list of parts")
    others = sorted({_kind(part) for part in content} - {"text", _READ})
    if others:
        raise DataError(
            f"{what} has parts that are not text: {', '.join(others)}; without policy.is_vlm=true the processors here "
            'read text only. Give parts {"type": "text", "text": ...}, leave the sample out, or use a processor of '
            "your own that puts them into row_inputs"
        )
    return "".join(image if _kind(part) == _READ else part["text"] for part in content)


_READ = "read image"


def _kind(part: Any) -> str:
    """Return the type of a part, or a description of a malformed part."""
    if not isinstance(part, Mapping):
        return type(part).__name__
    if isinstance(part.get("image"), Image):
        return _READ
    kind = str(part.get("type"))
    return kind if kind != "text" or isinstance(part.get("text"), str) else "text without a text"


def with_texts(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with each list of parts joined to one text, with `IMAGE_MARK` for each image.

    Raises:
        DataError: A part is neither text nor an image that was read.
    """
    return [
        {**message, "content": content_text(message["content"], image=IMAGE_MARK)}
        if isinstance(message.get("content"), list)
        else dict(message)
        for message in messages
    ]


def texts_between(text: str, opening: str, closing: str) -> list[str]:
    """Return each text between an opening text and the next closing text.

    The result equals that of `re.findall` with `opening(.*?)closing`, which needs quadratic time without closing texts.
    """
    found = []
    start = text.find(opening)
    while start >= 0:
        start += len(opening)
        end = text.find(closing, start)
        if end < 0:
            break
        found.append(text[start:end])
        start = text.find(opening, end + len(closing))
    return found
