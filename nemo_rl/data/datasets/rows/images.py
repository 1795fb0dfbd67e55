"""Bring the images in the messages of rows to one form: parts `{"type": "image", "image": X}`.

    image_url parts, paths, URLs, bytes ─► parts ─► places filled from the column `images` ─► absolute paths

X is an absolute path, a `data:` or `http(s):` URL, or `{"bytes": ..., "path": ...}`. Invariant: no image is loaded or
decoded here, and a part of a kind that no model here reads is refused by name.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from nemo_rl.data.bad_rows import RowError
from nemo_rl.data.datasets.rows.readers import RowTable, is_table
from nemo_rl.data.datasets.rows.values import kind_of, plain_text

if TYPE_CHECKING:
    import datasets
    import pyarrow

IMAGES = "images"
"""Column with the images of a row, in the order of their places in the messages."""

TAG = "<image>"
"""Place of an image in a text."""

Part = dict[str, Any]

_REFUSED = frozenset(("video", "audio", "video_url", "audio_url", "input_audio"))
_SIZES = ("resized_height", "resized_width")
"""Keys of a part that set the size of its image."""
_KEYS = frozenset(("type", "image", "image_url", "text", *_SIZES))
_KEYS_OF_REFERENCES = ("path", "url", "image")
_URLS = ("data:", "http://", "https://")
_STAND_IN = {"bytes": b"\0", "path": None}
"""Image in place of one that is not read yet."""


def has_media(content: Sequence[Any]) -> bool:
    """Return whether a list of parts has a part of a known kind that is not text."""
    kinds = {part.get("type") for part in content if isinstance(part, Mapping)}
    return not kinds.isdisjoint(_REFUSED | {"image", "image_url"})


def content_parts(content: Sequence[Any], what: str) -> list[Part]:
    """Return a list of text and image parts. An image part without an image is a place for one of the row's images.

    Args:
        what: Name of the content, for errors.

    Raises:
        RowError: A part is of another kind, or cannot be used.
    """
    return [_part(part, what) for part in content]


def image_reference(value: Any, what: str) -> Any:
    """Return an image as text (a path or a URL), or as `{"bytes": ..., "path": ...}`.

    Args:
        value: Text, bytes, or a mapping with `bytes`, `path`, `url` or `image`.
        what: Name of the value, for errors.

    Raises:
        RowError: The value is of another kind, or empty.
    """
    name = None
    if isinstance(value, Mapping):
        name = value.get("path")
        value = value.get("bytes") or next((value[key] for key in _KEYS_OF_REFERENCES if value.get(key)), None)
    if isinstance(value, bytes) and value:
        return {"bytes": value, "path": name}
    if isinstance(value, str) and value.strip():
        return plain_text(value, what)
    found = "empty" if value is None or value in ("", b"") else kind_of(value)
    raise RowError(f"{what} is {found}, not a path, a URL, or an object with 'bytes' or 'path'")


def split_at_tags(text: str) -> list[Part]:
    """Return the parts of a text, with an image part without an image for each `<image>`. Empty texts are left out."""
    parts: list[Part] = []
    for number, piece in enumerate(text.split(TAG)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def folder_of(table: RowTable) -> Path | None:
    """Return the folder to which relative paths of a table belong, or None if its rows are not from local files."""
    place = Path(table.name).expanduser()
    if place.is_dir():
        return place.absolute()
    return place.parent.absolute() if place.is_file() else None


def located(reference: Any, folder: Path | None) -> Any:
    """Return an image with an absolute path, or unchanged if it is a URL or bytes.

    Raises:
        RowError: The path is relative and there is no folder, or the URL is of an unknown kind.
    """
    if not isinstance(reference, str) or reference[:8].lower().startswith(_URLS):
        return reference
    if reference.lower().startswith("file://"):
        reference = unquote(reference[len("file://") :])
    if "://" in reference:
        raise RowError(f"the image {reference!r:.80} is a URL, and only data:, http: and https: are known")
    path = Path(reference).expanduser()
    if folder is None and not path.is_absolute():
        raise RowError(f"the image {reference!r:.80} is a relative path, but its row is not from a local file")
    return str(path if folder is None else folder / path)


def with_images(value: Any, row: Mapping[str, Any], folder: Path | None, *, fills: bool) -> Any:
    """Return formatted messages, or a formatted pair or labelled answer, with all of their images.

    Args:
        value: Content of a formatted row. Values of other forms are returned unchanged.
        row: The raw row, whose column `images` has the images of places without one.
        folder: Folder of relative paths, or None if there is none.
        fills: Whether to read the column `images`.

    Raises:
        RowError: The number of places differs from the number of images, or an image cannot be used.
    """
    given = _given(row) if fills and IMAGES in row else None
    if isinstance(value, list):
        return _Places(given, folder).filled(value, is_end=True)
    if not isinstance(value, Mapping) or "context" not in value:
        return value
    places = _Places(given, folder)
    made = {**value, "context": places.filled(value["context"], is_end=False)}
    if "completion" in value:
        return {**made, "completion": places.filled(value["completion"], is_end=True)}
    answers = [
        {**each, "completion": places.copy().filled(each["completion"], is_end=True)} for each in value["completions"]
    ]
    return {**made, "completions": answers}


class _Places:
    """The images of a row, which fill the places of its messages in order.

    Args:
        images: The images, or None if the row has no column of images. Tags in texts are then text.
        folder: Folder of relative paths.
        used: Number of images that earlier messages have used.
    """

    def __init__(self, images: list[Any] | None, folder: Path | None, used: int = 0) -> None:
        self._images, self._folder, self._used = images, folder, used

    def copy(self) -> "_Places":
        """Return a copy, which fills the places of another continuation of the same messages."""
        return _Places(self._images, self._folder, self._used)

    def filled(self, messages: list[dict[str, Any]], *, is_end: bool) -> list[dict[str, Any]]:
        """Return messages with their images.

        Args:
            is_end: Whether all images of the row must be used after these messages.
        """
        made = [self._message(message) for message in messages]
        count = len(self._images or ())
        if self._used > count or (is_end and self._used < count):
            column = f"{IMAGES!r} has {count}" if self._images is not None else f"it has no column {IMAGES!r}"
            raise RowError(f"the row has {self._used} places for images ({TAG}, or parts without one), and {column}")
        return made

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        if message["role"] == "assistant" or (isinstance(content, str) and not self._has_tag(content)):
            return message
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        return {**message, "content": [each for part in parts for each in self._parts(part)]}

    def _has_tag(self, text: str) -> bool:
        return self._images is not None and TAG in text

    def _parts(self, part: Part) -> Iterator[Part]:
        if part["type"] == "text":
            divided = split_at_tags(part["text"]) if self._has_tag(part["text"]) else [part]
        else:
            divided = [part]
        for each in divided:
            if each["type"] == "image":
                each = {**each, "image": located(each.get("image") or self._next(), self._folder)}
            yield each

    def _next(self) -> Any:
        """Return the next image. If there is none, `filled` refuses the row after counting all places."""
        self._used += 1
        images = self._images or ()
        return images[self._used - 1] if self._used <= len(images) else _STAND_IN


def _given(row: Mapping[str, Any]) -> list[Any]:
    images = row[IMAGES]
    if images is None:
        return []
    if not isinstance(images, list):
        raise RowError(f"{IMAGES!r} is {kind_of(images)}, not a list")
    return [image_reference(image, f"image {number} of {IMAGES!r}") for number, image in enumerate(images)]


def _part(part: Any, what: str) -> Part:
    if not isinstance(part, Mapping):
        raise RowError(f"{what} has a part that is {kind_of(part)}, not an object")
    kind = part.get("type")
    if kind in _REFUSED:
        raise RowError(f"{what} has a part of the type {kind!r}; models here read text and images only")
    if kind not in ("text", "image", "image_url"):
        raise RowError(f"{what} has a part of the unknown type {kind!r}; known: text, image, image_url")
    given = {key: value for key, value in part.items() if value is not None}
    if unknown := sorted(given.keys() - _KEYS):
        raise RowError(f"{what} has a part with the key {unknown[0]!r}, which has no effect here")
    if kind == "text":
        return {"type": "text", "text": plain_text(given.get("text"), what)}
    made: Part = {"type": "image"}
    value = _of_url(given.get("image_url"), what) if kind == "image_url" else given.get("image")
    if value is not None:
        made["image"] = image_reference(value, f"an image in {what}")
    return {**made, **_sizes(given, what)}


def _of_url(value: Any, what: str) -> Any:
    """Return the image of a part of OpenAI's kind `image_url`, whose value may be an object with `url`."""
    if isinstance(value, Mapping):
        if value.get("detail") not in (None, "auto"):
            raise RowError(f"{what} has an image with detail={value['detail']!r}, which has no effect here")
        value = value.get("url")
    if value is None:
        raise RowError(f"{what} has an image_url without a url")
    return value


def _sizes(part: Mapping[str, Any], what: str) -> Part:
    sizes = {key: part[key] for key in _SIZES if key in part}
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes.values())
    if sizes and (len(sizes) < len(_SIZES) or not whole):
        raise RowError(f"{what} has an image whose {' and '.join(_SIZES)} are not two whole numbers above 0")
    return sizes


def is_image_column(kind: "pyarrow.DataType") -> bool:
    """Return whether an Arrow type is that of images: bytes, a structure of `bytes` and `path`, or a list of these."""
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind):
        return is_image_column(kind.value_type)
    if types.is_struct(kind):
        return {field.name for field in kind} == {"bytes", "path"}
    return types.is_binary(kind) or types.is_large_binary(kind)


class UndecodedRows:
    """The rows of a table whose images stay bytes.

    Args:
        rows: A table.
        columns: Columns that are read.
    """

    def __init__(self, rows: "datasets.Dataset", columns: Sequence[str]) -> None:
        schema = rows.data.schema
        self._rows = rows.with_format("arrow")
        self.columns = [name for name in columns if name in schema.names and is_image_column(schema.field(name).type)]
        """Columns that contain nothing but images."""
        nested = [name for name in columns if name in schema.names and "binary" in str(schema.field(name).type)]
        self.has_images = bool(nested)
        """Whether a column that is read contains images, which a usual table would decode."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self._rows[index].to_pylist()[0]
        return row

    def batch(self, start: int, stop: int, columns: Sequence[str]) -> list[dict[str, Any]]:
        """Return rows with the given columns. Images of `self.columns` are not read, and are stand-ins."""
        narrow = self._rows.select_columns(list(columns))[start:stop]
        present = [name for name in columns if name not in self.columns]
        rows: list[dict[str, Any]] = narrow.select(present).to_pylist() if present else [{} for _ in range(len(narrow))]
        for name in self.columns:
            for row, value in zip(rows, _stand_ins(narrow[name]), strict=True):
                row[name] = value
        return rows


def undecoded(table: RowTable, columns: Sequence[str]) -> UndecodedRows | None:
    """Return the rows of a table without decoding their images. None if columns that are read have no images."""
    if not is_table(table.rows):
        return None
    rows = UndecodedRows(table.rows, columns)
    return rows if rows.has_images else None


def _stand_ins(column: Any) -> Iterator[Any]:
    """Yield a value of the right form for each value of a column of images, without reading its bytes."""
    import pyarrow.compute
    from pyarrow import types

    if types.is_list(column.type) or types.is_large_list(column.type):
        for count in pyarrow.compute.list_value_length(column).to_pylist():
            yield None if count is None else [_STAND_IN] * count
        return
    for valid in column.is_valid().to_pylist():
        yield _STAND_IN if valid else None
