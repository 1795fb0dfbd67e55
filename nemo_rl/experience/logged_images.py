"""Describe the images of samples in the logs of runs, and write a small picture of each image.

    line of a sample    "images": [{"digest", "source", "size", "tokens"}, ...] in the order of the images' tokens
    images/DIGEST.png   the picture as the model's image processor gets it
    images/DIGEST.jpg   the same with losses, if the original is a JPEG file or has a side of more than 256 pixels

Pictures of more than 256 pixels are made smaller, because a log must not become a copy of a data set. Pictures have no
metadata of the original files, such as places and names of cameras. Invariants: a picture is written once for all
samples and steps of a folder, and a picture that cannot be written costs only itself.
"""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from nemo_rl.files.writing import OptionalOutput, write_atomically

if TYPE_CHECKING:
    from nemo_rl.data.images.image import Image
    from nemo_rl.data.images.rows import RowImages
    from nemo_rl.experience.trajectory import Trajectory

FOLDER = "images"
"""Folder of the pictures, next to the files of samples."""
SUFFIXES = (".png", ".jpg")
"""Suffixes of the pictures without and with losses."""
_JPEG = b"\xff\xd8\xff"
_MOST_PIXELS = 256
_QUALITY = 85
_PLACEHOLDERS = tuple(map(re.compile, (r"<\|image_pad\|>|<image>", r"<\|image_pad\|>", r"<image>")))
"""Texts that stand for images in messages. A text in a row may contain the one that its model does not use."""


class LoggedImage(TypedDict):
    """An image of a sample, as in the sample's line."""

    digest: str
    """Hash that names the image and its picture."""
    source: str
    """Path or address of the file; "data" if the row contains the image."""
    size: list[int]
    """Width and height in pixels."""
    tokens: list[int]
    """Index of the image's first token in the conversation, and the index after its last token."""


def logged_images(row: "Trajectory") -> list[LoggedImage]:
    """Return the images of a conversation that has its tokens.

    Raises:
        DataError: the tokens are not those of the images.
    """
    images = _images_of(row)
    if images is None:
        return []
    ids = [token for message in row.message_log for token in message["token_ids"].tolist()]
    return [
        {"digest": image.digest, "source": image.source, "size": [*image.size], "tokens": [found.start, found.stop]}
        for image, found in zip(images.images, images.ranges(ids), strict=True)
    ]


def _images_of(row: "Trajectory") -> "RowImages | None":
    return None if row.row_inputs is None else row.row_inputs.images


class ImageLog:
    """Write the pictures of samples into a folder of logs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._written: set[str] = set()
        self._output = OptionalOutput(f"Pictures of images in {self._folder}")

    def write(self, row: "Trajectory") -> list[LoggedImage]:
        """Write the pictures of a conversation that are not written yet, and return its images.

        Pictures that cannot be written are tried again with the next sample that has them.
        """
        images = _images_of(row)
        for image in () if images is None else images.images:
            if image.digest not in self._written:
                with self._output.attempt():
                    self._write(image)
                    self._written.add(image.digest)
        return logged_images(row)

    def _write(self, image: "Image") -> None:
        is_exact = max(image.size) <= _MOST_PIXELS and not image.encoded.startswith(_JPEG)
        path = self._folder / f"{image.digest}{SUFFIXES[0] if is_exact else SUFFIXES[1]}"
        if path.exists():
            return
        picture, content = image.picture(), io.BytesIO()
        picture.thumbnail((_MOST_PIXELS, _MOST_PIXELS))
        picture.save(content, **({"format": "PNG"} if is_exact else {"format": "JPEG", "quality": _QUALITY}))
        self._folder.mkdir(exist_ok=True)
        write_atomically(path, content.getvalue())


def image_text(index: int, image: Mapping[str, Any]) -> str:
    """Return a short text for an image of a sample, such as `[image 1: 28x28, tokens 5 to 8]`.

    Args:
        index: number of the image in the sample, from 0.
        image: a `LoggedImage`, in which `size` and `tokens` may be None.
    """
    facts = [] if image["size"] is None else ["{}x{}".format(*image["size"])]
    if image["tokens"] is not None:
        first, last = image["tokens"][0], image["tokens"][1] - 1
        facts.append(f"token {first}" if first == last else f"tokens {first} to {last}")
    return f"[image {index + 1}{': ' if facts else ''}{', '.join(facts)}]"


def placed(messages: Sequence[Mapping[str, Any]], images: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[int]]]:
    """Find the messages in which images stand.

    Args:
        messages: messages of a conversation, whose `content` has one placeholder for each image.
        images: the conversation's images.

    Returns:
        For each message, its text with `image_text` in place of placeholders, and the numbers of its images from 0. The
        texts are unchanged and have no images if there is another number of placeholders.
    """
    texts = [str(message.get("content", "")) for message in messages]
    for pattern in _PLACEHOLDERS if images else ():
        pieces = [
            [text] if message.get("role") == "assistant" else pattern.split(text)
            for message, text in zip(messages, texts, strict=True)
        ]
        if sum(map(len, pieces)) - len(pieces) == len(images):
            return _named(pieces, images)
    return [(text, []) for text in texts]


def _named(pieces: Sequence[Sequence[str]], images: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[int]]]:
    """Join the pieces of each message with the texts of the images between them."""
    named, start = [], 0
    for first, *others in pieces:
        own = list(range(start, start + len(others)))
        text = first + "".join(
            image_text(number, images[number]) + other for number, other in zip(own, others, strict=True)
        )
        named.append((text, own))
        start += len(others)
    return named
