"""Put the images of samples into the page as `data:` addresses, each once.

The pictures are those that a run wrote next to its samples (`experience.logged_images`). They are not decoded here.
Invariant: a picture that is missing, too large or of another kind costs only itself, and the size of all pictures of a
page is limited.
"""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl.experience.logged_images import FOLDER, SUFFIXES
from nemo_rl.files.regular_file import open_regular

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_SOURCE_CHARS = 500
_MOST_BYTES = 2**18
"""Largest size of a picture. One of 256 x 256 pixels without any compression is smaller."""
_MOST_CHARS_OF_ALL = 8_000_000
"""Largest size of all addresses of a page together."""
_KINDS = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg"}
_LARGEST = 2**53


def images_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the images in a line of a sample. Values of a wrong kind are None."""
    images = row.get("images")
    return [_image(image if isinstance(image, dict) else {}) for image in images] if isinstance(images, list) else []


def _image(image: Mapping[str, Any]) -> dict[str, Any]:
    digest, source = image.get("digest"), image.get("source")
    is_named = isinstance(digest, str) and _DIGEST.fullmatch(digest)
    return {
        "digest": digest if is_named else None,
        "source": source[:_MOST_SOURCE_CHARS] if isinstance(source, str) else None,
        "size": _pair(image.get("size")),
        "tokens": _pair(image.get("tokens")),
    }


def _pair(value: Any) -> list[int] | None:
    is_pair = isinstance(value, list) and len(value) == 2
    return value if is_pair and all(type(number) is int and 0 <= number < _LARGEST for number in value) else None


class PageImages:
    """The pictures of a page."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        """The address of each picture by the digest of its image."""
        self._room = _MOST_CHARS_OF_ALL

    def add(self, folders: Sequence[Path], images: Iterable[dict[str, Any]]) -> None:
        """Add the pictures of images, and write into each image without one the reason as `note`.

        Args:
            folders: log folders of the run that has the images.
        """
        for image in images:
            digest = image["digest"]
            if digest in self.addresses:
                continue
            found = None if digest is None else _address(folders, digest)
            if found is None:
                image["note"] = f"The log folder has no picture of this image ({FOLDER}/)."
            elif len(found) > self._room:
                image["note"] = "This page has no room for the picture of this image."
            else:
                self.addresses[digest] = found
                self._room -= len(found)


def _address(folders: Sequence[Path], digest: str) -> str | None:
    """Return the address of a picture, or None if there is none that a page may show."""
    for path in (folder / FOLDER / f"{digest}{suffix}" for folder in folders for suffix in SUFFIXES):
        try:
            with open_regular(path) as file:
                content = file.read(_MOST_BYTES + 1)
        except OSError:
            continue
        kind = next((kind for start, kind in _KINDS.items() if content.startswith(start)), None)
        if kind is not None and len(content) <= _MOST_BYTES:
            return f"data:{kind};base64,{base64.b64encode(content).decode()}"
    return None
