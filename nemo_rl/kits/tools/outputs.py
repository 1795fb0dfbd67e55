"""Convert what a tool returns to what a model reads: a text, or texts and images.

    picture, image part, list with one ─► parts, with images as data: addresses ─► environment, which reads the images
    any other value                    ─► text

Invariant: parts can be written as JSON, and the module imports neither torch nor ray, because the process of an
isolated tool imports it too.
"""

import base64
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl.kits.tools.interfaces import ToolOutput, cut_to_bytes, text_of_output

NOT_SEEN = "[image: this model reads text only]"
"""Text that a model without images reads in place of an image."""
_SHOWN = "<image>"
"""Place of an image in `ToolOutput.text`."""
_SIZES = ("resized_height", "resized_width")

type Part = dict[str, Any]


@dataclass(frozen=True)
class OutputLimits:
    """Limits on the output of a call."""

    max_bytes: int
    """Largest number of bytes of text."""
    max_image_bytes: int = 0
    """Largest number of bytes of all images. 0 for a model that reads text only, which gets `NOT_SEEN` instead."""


def tool_output(value: Any, limits: OutputLimits) -> ToolOutput:
    """Return the output of a call for the value that the tool returned.

    An image is a picture of Pillow, an `Image` of the library, a block of the Model Context Protocol (`type`, `data`
    and `mimeType`), or a part `image` or `image_url`. In a list with an image, texts and text parts are texts, and any
    other item is written as JSON.

    Raises:
        ValueError: the images are larger than the limit.
    """
    values = list(value) if isinstance(value, list | tuple) else [value]
    if not any(map(is_image, values)):
        return ToolOutput(text_of_output(value, limits.max_bytes))
    return output_of_parts([_part(each) for each in values], limits)


def is_image(value: Any) -> bool:
    """Return whether a value that a tool returned is an image."""
    if not isinstance(value, Mapping):
        return (hasattr(value, "save") and hasattr(value, "convert")) or hasattr(value, "data_url")
    kind = value.get("type")
    if kind == "image":
        return value.get("image") is not None or isinstance(value.get("data"), str)
    return kind == "image_url" and value.get("image_url") is not None


def _part(value: Any) -> Part:
    if is_image(value):
        sizes = {key: value[key] for key in _SIZES if isinstance(value, Mapping) and value.get(key) is not None}
        return {"type": "image", "image": _address(value), **sizes}
    if isinstance(value, Mapping) and value.get("type") == "text" and isinstance(value.get("text"), str):
        return {"type": "text", "text": value["text"]}
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return {"type": "text", "text": text}


def _address(value: Any) -> str:
    """Return the address of an image, which is a data: address unless the tool gave another one."""
    if isinstance(value, Mapping):
        if isinstance(value.get("data"), str):
            return data_address(value["data"])
        given = value.get("image", value.get("image_url"))
        return _address(given["url"] if isinstance(given, Mapping) and "url" in given else given)
    if hasattr(value, "data_url"):
        return str(value.data_url())
    if isinstance(value, bytes | bytearray):
        return data_address(base64.b64encode(value).decode())
    if hasattr(value, "save"):
        file = io.BytesIO()
        value.convert("RGB").save(file, format="PNG")
        return data_address(base64.b64encode(file.getvalue()).decode())
    return str(value)


def data_address(encoded: str) -> str:
    """Return the data: address of an image file in base64, which may have line breaks."""
    return "data:image;base64," + "".join(encoded.split())


def output_of_parts(parts: Iterable[Part], limits: OutputLimits) -> ToolOutput:
    """Return the output with texts and images in order. The texts together are cut to the limit.

    Raises:
        ValueError: the images are larger than the limit.
    """
    made: list[Part] = []
    room, image_room = limits.max_bytes, limits.max_image_bytes
    for part in parts:
        if part["type"] == "image" and limits.max_image_bytes:
            image_room -= len(part["image"]) * 3 // 4
            if image_room < 0:
                raise ValueError(
                    f"the images of one call have more than {limits.max_image_bytes / 1e6:g} megabytes "
                    "(data.images.max_megabytes)"
                )
            made.append(part)
            continue
        said = cut_to_bytes(part["text"] if part["type"] == "text" else NOT_SEEN, max(room, 0))
        room -= len(said.encode())
        if made and made[-1]["type"] == "text":
            made[-1] = {"type": "text", "text": f"{made[-1]['text']}\n{said}"}
        else:
            made.append({"type": "text", "text": said})
    text = "\n".join(part["text"] if part["type"] == "text" else _SHOWN for part in made)
    return ToolOutput(text, parts=made if any(part["type"] == "image" for part in made) else ())
