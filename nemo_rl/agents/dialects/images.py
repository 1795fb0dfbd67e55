"""Read the contents of a request's messages, whose parts are texts and, with a policy that reads images, images.

    part of a dialect ─► `Contents` ─► {"type": "text", "text": ...} or {"type": "image", "image": Image}

An image is read once, when its request is read, so its file is checked before anything is sampled. Invariant: a request
opens no file. It may name a path or an address only if the row of its sample has an image from there, or if the run
downloads images (`data.images.allow_urls`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

from nemo_rl.agents.dialects.fields import SEPARATOR, Fields, not_a_text, part_text, parts_of
from nemo_rl.agents.endpoint.calls import CallError
from nemo_rl.config.schema.data import ImagesConfig
from nemo_rl.data.images.image import Image, load_image
from nemo_rl.data.messages.content import Content, ImagePart, TextPart
from nemo_rl.utils.errors import DataError

MOST_IMAGES = 256
"""Largest number of images of a request."""
_ADDRESSES = ("http://", "https://")


@dataclass
class ImageReader:
    """Read the images of one sample's requests."""

    limits: ImagesConfig | None = None
    """Limits on files and pixels, or None if the policy reads text only."""
    known: Mapping[str, Image] = field(default_factory=dict)
    """Images of the sample's row by path or address."""
    _downloaded: dict[str, Image] = field(default_factory=dict)
    """Images by address. A later request with the address gets the same image, whatever the server then sends."""
    _num_read: int = 0
    """Number of images of the request."""

    def of_request(self) -> "ImageReader":
        """Return a reader for one more request of the sample."""
        return replace(self, _num_read=0)

    def read(self, address: str, part: Fields, name: str) -> ImagePart:
        """Return the part of the image with an address.

        Args:
            address: a data:, http: or https: address, or a path (also as a file: address).
            part: the part that names the image.
            name: field of the part with the address, for errors.

        Raises:
            CallError: the image cannot be used.
        """
        place = part.name_of(name)
        self._num_read += 1
        if self._num_read > MOST_IMAGES:
            raise CallError(
                400, f"A request may have {MOST_IMAGES} images; {place} is one more.", "invalid_image", place
            )
        try:
            return {"type": "image", "image": self._image(address)}
        except DataError as error:
            raise CallError(400, f"{place}: {error}.", "invalid_image", place) from error

    def _image(self, address: str) -> Image:
        assert self.limits is not None, "a text policy's contents have no parts with images"
        if address[:5].lower() == "data:":
            return load_image({"image": "data:" + address[5:]}, self.limits)
        known = self.known.get(address) or self.known.get(unquote(address.removeprefix("file://")))
        if known is not None:
            return known
        if not address.lower().startswith(_ADDRESSES):
            raise DataError(
                f"{address[:80]!r} is neither a data: address nor an image of the sample's row, and the endpoint opens "
                "no files. Send the image itself as data:image/png;base64,..."
            )
        if address not in self._downloaded:
            self._downloaded[address] = load_image({"image": address}, self.limits)
        return self._downloaded[address]


type PartReader = Callable[[Fields, ImageReader], ImagePart]
"""Function that reads a part of a dialect that is an image."""


@dataclass(frozen=True)
class Contents:
    """Read contents of messages that may have images."""

    texts: Collection[str]
    """Types of parts that are texts. The first one is also the type of a content that is a text itself."""
    images: Mapping[str, PartReader]
    """Functions for the types of parts that are images."""

    def read(self, message: Fields, images: ImageReader, name: str = "content") -> Content:
        """Return a content as a text, or as parts if it has an image.

        Args:
            message: the object with the content.
            name: name of the field with the content.

        Raises:
            CallError: the content has other parts, or an image cannot be used.
        """
        return joined([self.part(part, images) for part in parts_of(message, next(iter(self.texts)), name)])

    def required(self, message: Fields, images: ImageReader, name: str = "content") -> Content:
        """Return a content that has to be given. The arguments and errors are those of `read`."""
        if not message.has(name):
            raise message.wrong(name, "a text or a list of parts")
        return self.read(message, images, name)

    def part(self, part: Fields, images: ImageReader) -> TextPart | ImagePart:
        """Return one part.

        Raises:
            CallError: the part is neither a text nor an image that the policy reads.
        """
        kind = part.required_text("type")
        reads = {} if images.limits is None else self.images
        if kind in reads:
            return reads[kind](part, images)
        if kind not in self.texts:
            raise not_a_text(part, self.texts, reads)
        return {"type": "text", "text": part_text(part, self.texts)}


def joined(parts: Sequence[TextPart | ImagePart]) -> Content:
    """Return the parts of a content, or their joined text if none of them is an image.

    As in rows with images, the chat template joins the parts of a content that has an image.
    """
    if any(part["type"] == "image" for part in parts):
        return list(parts)
    return SEPARATOR.join(part["text"] for part in parts if part["type"] == "text")


_DETAILS = ("auto", "high", "original")


def check_detail(fields: Fields) -> None:
    """Refuse an image that shall be made smaller, because only the run's image processor changes sizes.

    Raises:
        CallError: `detail` is "low" or unknown.
    """
    if fields.has("detail") and fields.values["detail"] not in _DETAILS:
        raise fields.unsupported("detail", f"Leave it out, or set it to {' or '.join(_DETAILS)}.")


def as_requested(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of a row in the form in which a program sends them: images are `image_url` parts."""
    return [{**message, "content": _sent(message.get("content"))} for message in messages]


def _sent(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [
        {"type": "image_url", "image_url": {"url": part["image"].data_url()}}
        if isinstance(part, Mapping) and isinstance(part.get("image"), Image)
        else part
        for part in content
    ]
