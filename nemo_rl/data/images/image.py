"""Read the images of rows and pass them between processes by reference.

A part of a message names an image. `load_image` reads its file once, checks it and gives it the hash of its content.
All processes use this hash as the image's name. Invariant: an `Image` is readable. A file that is missing, broken or
too large raises a `DataError` with the reason, before any model sees the row.

The encoded file is what travels. The first process that sends an image puts the file into Ray's object store, and all
copies of the image refer to this object. The samples of a prompt therefore share one file, and pixels are made where a
model needs them (`rows.RowImages`).
"""

import base64
import binascii
import hashlib
import io
import multiprocessing
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from nemo_rl.config.schema.data import ImagesConfig
from nemo_rl.host.boundary import Boundary
from nemo_rl.utils.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

_TURNED = (5, 6, 7, 8)
"""Values of the EXIF tag for the orientation that swap height and width."""
_ORIENTATION = 0x0112
_TIMEOUT_S = 20.0
"""Time limit in seconds for each part of a download."""
_DOWNLOAD_S = 120.0
"""Time limit in seconds for a download."""
IN_ROW = "data"
"""Source of an image that its row, observation or request contains."""
_RESIZE_KEYS = ("resized_height", "resized_width")


class Image:
    """An image file that can be read.

    Args:
        encoded: bytes of the file, or the reference of an object of Ray with these bytes.
        digest: sha256 of the bytes and of the requested size, in hexadecimal.
        size: width and height in pixels, after the file's orientation and the requested size.
        source: path or address of the file, for messages and reports; `IN_ROW` if the row contains the bytes.
        resized: whether the row requested the size.
    """

    def __init__(self, encoded: Any, digest: str, size: tuple[int, int], source: str, *, resized: bool = False) -> None:
        self._encoded = encoded
        self._reference: Any = None
        self.digest = digest
        self.size = size
        self.source = source
        self.resized = resized

    def __repr__(self) -> str:
        return f"Image({self.source!r}, {self.size[0]}x{self.size[1]}, {self.digest[:12]})"

    @property
    def encoded(self) -> bytes:
        """Return the bytes of the file."""
        if not isinstance(self._encoded, bytes):
            import ray

            self._reference, self._encoded = self._encoded, ray.get(self._encoded)
        file: bytes = self._encoded
        return file

    def picture(self) -> "Picture":
        """Decode the file to RGB, in its orientation and the requested size."""
        picture = _decoded(self.encoded)
        return picture.resize(self.size, resample=3) if self.resized else picture

    def data_url(self) -> str:
        """Return the image as a data: address, from which `load_image` reads the same pixels."""
        from PIL import Image as pillow

        encoded, kind = self.encoded, "image/png"
        if self.resized:
            encoded = _png(self.picture())
        else:
            with pillow.open(io.BytesIO(encoded)) as picture:
                kind = pillow.MIME.get(str(picture.format), kind)
        return f"data:{kind};base64,{base64.b64encode(encoded).decode()}"

    def state_dict(self) -> dict[str, Any]:
        """Return the image as plain values for a checkpoint, which contains the file of each image once."""
        return {
            "encoded": self.encoded,
            "digest": self.digest,
            "size": list(self.size),
            "source": self.source,
            "resized": self.resized,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Image":
        """Return the image of a `state_dict`.

        Raises:
            DataError: the stored file is not the one that `digest` names.
        """
        known = _KNOWN.get(state["digest"])
        if known is not None:
            return known
        image = cls(**{**state, "size": (int(state["size"][0]), int(state["size"][1]))})
        if _digest(image.encoded, image.size if image.resized else None) != image.digest:
            raise DataError(f"the stored file of {image} is not the one that its hash names")
        return _one_per_process(image)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Image":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._portable(), self.digest, self.size, self.source, self.resized)

    def _portable(self) -> Any:
        """Return a reference to the file in Ray's object store, or the bytes where there is none."""
        if self._reference is None and isinstance(self._encoded, bytes) and _has_store():
            import ray

            self._reference = ray.put(self._encoded)
        return self._encoded if self._reference is None else self._reference


_KNOWN: "WeakValueDictionary[str, Image]" = WeakValueDictionary()


def _one_per_process(image: Image) -> Image:
    return _KNOWN.setdefault(image.digest, image)


def _received(encoded: Any, digest: str, size: tuple[int, int], source: str, resized: bool) -> Image:
    return _one_per_process(Image(encoded, digest, size, source, resized=resized))


def _has_store() -> bool:
    """Return whether this process is connected to Ray. A process of a data loader is forked and must not use it."""
    ray: Any = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and multiprocessing.parent_process() is None


def load_image(part: Mapping[str, Any], limits: ImagesConfig) -> Image:
    """Read the image of a message's part.

    Args:
        part: `image` is a path (also as a file:// address), a data: address, an http(s) address, bytes, a mapping with
            `bytes` or `path` (an undecoded image of the package datasets) or a picture of Pillow. `resized_height` and
            `resized_width` request a size.
        limits: limits on files and pixels.

    Raises:
        DataError: the file is missing, cannot be decoded, exceeds a limit, or its address is not allowed.
    """
    encoded, source = _read(part.get("image"), limits)
    if len(encoded) > limits.max_megabytes * 1e6:
        raise DataError(
            f"the image {source} has {len(encoded) / 1e6:.1f} megabytes, more than data.images.max_megabytes="
            f"{limits.max_megabytes:g}"
        )
    wanted = _requested_size(part)
    digest = _digest(encoded, wanted)
    known = _KNOWN.get(digest)
    if known is not None:
        return known
    size = _checked_size(encoded, source, limits)
    return _one_per_process(Image(encoded, digest, wanted or size, source, resized=wanted is not None))


def _digest(encoded: bytes, wanted: tuple[int, int] | None) -> str:
    """Return the hash that names an image, of its file and of the width and height that a row requests."""
    return hashlib.sha256(encoded + repr(wanted).encode()).hexdigest()


def _read(value: Any, limits: ImagesConfig) -> tuple[bytes, str]:
    """Return the bytes of a file and its name."""
    if isinstance(value, Mapping):
        given = value.get("bytes")
        if given is None:
            return _read(value.get("path"), limits)
        return bytes(given), str(value.get("path") or IN_ROW)
    if isinstance(value, bytes | bytearray):
        return bytes(value), IN_ROW
    if isinstance(value, str | Path):
        return _read_address(str(value), limits)
    if hasattr(value, "save") and hasattr(value, "convert"):
        return _png(value.convert("RGB")), IN_ROW
    raise DataError(
        f"an image is {type(value).__name__}; give a path, a data: address, bytes, or a mapping with bytes or path"
    )


def _png(picture: "Picture") -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def _read_address(address: str, limits: ImagesConfig) -> tuple[bytes, str]:
    if address.startswith("data:"):
        head, _, body = address.partition(",")
        try:
            return base64.b64decode(body, validate=True), IN_ROW
        except (binascii.Error, ValueError):
            raise DataError(f"the address {head[:40]!r} of an image is not valid base64") from None
    if address.startswith(("http://", "https://")):
        return _download(address, limits), address
    path = Path(address.removeprefix("file://")).expanduser()
    try:
        if not path.is_file():
            raise DataError(f"the image {address} is not a file")
        if path.stat().st_size > limits.max_megabytes * 1e6:
            raise DataError(
                f"the image {address} has {path.stat().st_size / 1e6:.1f} megabytes, more than "
                f"data.images.max_megabytes={limits.max_megabytes:g}"
            )
        return path.read_bytes(), str(path)
    except OSError as error:
        raise DataError(f"the image {address} cannot be read ({error.strerror})") from None


def _download(address: str, limits: ImagesConfig) -> bytes:
    if not limits.allow_urls:
        raise DataError("an image is an http address, which data.images.allow_urls=true would download")
    import httpx

    deadline = time.monotonic() + _DOWNLOAD_S
    try:
        with httpx.stream("GET", address, timeout=_TIMEOUT_S, follow_redirects=True) as response:
            response.raise_for_status()
            body = bytearray()
            for piece in response.iter_bytes():
                body += piece
                if len(body) > limits.max_megabytes * 1e6:
                    break
                if time.monotonic() > deadline:
                    raise DataError(f"the image {address} was not downloaded within {_DOWNLOAD_S:g} s")
            return bytes(body)
    except httpx.HTTPError as error:
        raise DataError(f"the image {address} cannot be downloaded ({error})") from None


def _requested_size(part: Mapping[str, Any]) -> tuple[int, int] | None:
    given = [part.get(key) for key in _RESIZE_KEYS]
    if given == [None, None]:
        return None
    height, width = given
    if not isinstance(height, int) or not isinstance(width, int) or height < 1 or width < 1:
        raise DataError(f"resized_height={height!r} and resized_width={width!r} of an image are not sizes in pixels")
    return width, height


def _checked_size(encoded: bytes, source: str, limits: ImagesConfig) -> tuple[int, int]:
    """Decode a file once, and return width and height in its orientation."""
    from PIL import UnidentifiedImageError

    with Boundary(Exception) as caught:  # decoders raise errors of any kind for broken files
        return _size_of(encoded, source, limits)
    error = caught.take()
    if isinstance(error, DataError):
        raise error
    if isinstance(error, UnidentifiedImageError):
        raise DataError(f"the image {source} is not in a format that Pillow reads")
    raise DataError(f"the image {source} is broken ({error})")


def _size_of(encoded: bytes, source: str, limits: ImagesConfig) -> tuple[int, int]:
    from PIL import Image as pillow

    with pillow.open(io.BytesIO(encoded)) as picture:
        width, height = picture.size
        if width * height > limits.max_megapixels * 1e6:
            raise DataError(
                f"the image {source} has {width} x {height} pixels, more than data.images.max_megapixels="
                f"{limits.max_megapixels:g} million"
            )
        picture.load()
        return (height, width) if picture.getexif().get(_ORIENTATION) in _TURNED else (width, height)


def _decoded(encoded: bytes) -> "Picture":
    from PIL import Image as pillow
    from PIL import ImageOps

    with pillow.open(io.BytesIO(encoded)) as picture:
        return ImageOps.exif_transpose(picture).convert("RGB")
