"""Read local files of rows, with the place of each row.

Text files are read as bytes and decoded row by row, so a broken row does not affect other rows. Invariant: `rows[i]`
comes from `lines[i]`, and everything that is not a valid row is in `bad_rows`.
"""

import csv
import gzip
import io
import itertools
import json
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from nemo_rl.data.bad_rows import BadRow, RowError
from nemo_rl.files.regular_file import read_bytes, require_regular
from nemo_rl.utils.errors import DataError

if TYPE_CHECKING:
    # `datasets` is imported only when a table is read, because generated data sets and text files do not need it.
    import datasets

NOT_UTF8 = "not valid UTF-8"
NOT_AN_OBJECT = "not a JSON object"
TOO_LONG_NUMBER = "a number has more digits than Python reads"
TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv")
TABLE_SUFFIXES = (".parquet", ".arrow")
ALLOWED_FILES = "*.jsonl, *.ndjson, *.json, *.csv (each also with .gz), *.parquet, *.arrow"

_BOM = b"\xef\xbb\xbf"
_MAX_CSV_FIELD = 2**31 - 1
_DELIMITERS = (",", ";", "\t", "|")

Row = Mapping[str, Any]
"""Columns of a raw row, by name."""

type Record = tuple[int, Mapping[str, Any] | str]
"""Line in which a row begins, with the row or the reason why it cannot be used."""


class WrittenFloat(float):
    """A number of a JSON file that keeps its digits as text."""

    def __new__(cls, text: str) -> "WrittenFloat":
        """Read the number."""
        made = super().__new__(cls, text)
        made.text = text
        return made

    text: str

    def __getnewargs__(self) -> tuple[str]:  # type: ignore[override]
        return (self.text,)


@dataclass
class RowTable:
    """Rows with their places in the file or data set."""

    name: str
    """Path of the file, or name of the data set."""
    rows: Sequence[Mapping[str, Any]]
    """Mappings from column to value, by position."""
    lines: Sequence[int]
    """Place of each row (`BadRow.line`). The sequence is as long as `rows`."""
    bad_rows: list[BadRow] = field(default_factory=list)
    """Lines or records that could not be read as a row."""

    @property
    def num_rows(self) -> int:
        """Number of rows, including unreadable rows."""
        return len(self.rows) + len(self.bad_rows)


def is_file_path(data_path: str) -> bool:
    """Return whether a text is a local file's path (it exists, or has a file's suffix) instead of a hub id."""
    return Path(data_path).expanduser().is_file() or _kind(Path(data_path)) is not None


def read_file(data_path: str) -> RowTable:
    """Read a local file. Its suffix determines the format.

    Raises:
        DataError: The file does not exist, has an unknown format, or is damaged as a whole.
    """
    path = Path(data_path).expanduser()
    kind = _kind(path)
    if path.is_dir():
        raise DataError(f"data_path {data_path!r} is a folder, though it is named like a file. Name the file in it.")
    if path.exists() and not path.is_file():
        raise DataError(f"data_path {data_path!r} is a pipe, a socket or a device. Write it to a file first.")
    if not path.is_file():
        raise DataError(f"data_path {data_path!r} does not exist.{_near_names(path)}")
    if kind is None:
        raise DataError(f"data_path {data_path!r} is of an unknown kind; allowed: {ALLOWED_FILES}.")
    if kind in TABLE_SUFFIXES:
        return table_of(data_path, _read_table(path, kind))
    content = _read_bytes(path)
    if kind == ".csv":
        records = _csv_rows(data_path, content)
    elif kind == ".json" and content.lstrip()[:1] == b"[":
        records = _json_array_rows(data_path, content)
    else:
        records = _json_lines_rows(content)
    return _table(data_path, records)


def is_table(rows: Any) -> "TypeGuard[datasets.Dataset]":
    """Return whether rows are a Hugging Face data set. The library is not imported for this."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(rows, library.Dataset)


def table_of(name: str, dataset: "datasets.Dataset") -> RowTable:
    """Wrap a Hugging Face data set. The line of each row is its index."""
    return RowTable(name, dataset, range(len(dataset)))


def _table(name: str, records: Iterator[Record]) -> RowTable:
    rows: list[Mapping[str, Any]] = []
    lines: list[int] = []
    bad: list[BadRow] = []
    for line, row in records:
        if isinstance(row, str):
            bad.append(BadRow(name, line, row))
        else:
            rows.append(row)
            lines.append(line)
    return RowTable(name, rows, lines, bad)


def _kind(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in TABLE_SUFFIXES:
        return suffixes[-1]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in TEXT_SUFFIXES else None


def _near_names(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f" Neither does its folder {str(folder.absolute())!r}."
    near = get_close_matches(path.name, [entry.name for entry in folder.iterdir()], n=3)
    where = f" Looked in {str(folder.absolute())!r}."
    return where + (f" Did you mean {' or '.join(near)}?" if near else "")


def _read_bytes(path: Path) -> bytes:
    try:
        content = read_bytes(path)
        if path.suffix.lower() == ".gz":
            content = gzip.decompress(content)
    except (EOFError, zlib.error, OSError) as error:
        raise DataError(f"data_path {str(path)!r} cannot be read: {error}.") from error
    return content.removeprefix(_BOM)


def _read_table(path: Path, kind: str) -> "datasets.Dataset":
    import datasets
    import pyarrow
    import pyarrow.parquet

    try:
        require_regular(path)
        if kind == ".parquet":
            return datasets.Dataset(pyarrow.parquet.read_table(path))
        return datasets.Dataset.from_file(str(path))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"data_path {str(path)!r} cannot be read as {kind}: {error}") from error


def _json_lines_rows(content: bytes) -> Iterator[Record]:
    """Yield one JSON object for each line, and skip blank lines."""
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield number, _parse_line(line)


def _parse_line(line: bytes) -> dict[str, Any] | str:
    try:
        value = json.loads(line.decode("utf-8"), object_pairs_hook=_with_each_key_once, parse_float=WrittenFloat)
    except RowError as error:
        return str(error)
    except UnicodeDecodeError:
        return NOT_UTF8
    except (json.JSONDecodeError, RecursionError):
        return "not valid JSON"
    except ValueError:  # raised by `int`
        return TOO_LONG_NUMBER
    return value if isinstance(value, dict) else NOT_AN_OBJECT


def _json_array_rows(name: str, content: bytes) -> Iterator[Record]:
    """Yield the objects of a JSON array. Undecodable bytes become surrogates that affect only their own row."""
    text = content.decode("utf-8", errors="surrogateescape")
    for line, value in _array_items(name, text):
        if isinstance(value, RowError):
            yield line, str(value)
        elif not isinstance(value, dict):
            yield line, NOT_AN_OBJECT
        elif _has_undecodable(json.dumps(value, ensure_ascii=False)):
            yield line, NOT_UTF8
        else:
            yield line, value


def _array_items(name: str, text: str) -> Iterator[tuple[int, Any]]:
    """Yield the line in which each item begins, with the item or the reason why it cannot be used."""
    faults: list[RowError] = []

    def read_int(digits: str) -> int:
        try:
            return int(digits)
        except ValueError:
            faults.append(RowError(TOO_LONG_NUMBER))
            return 0

    def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        try:
            return _with_each_key_once(pairs)
        except RowError as error:
            faults.append(error)
            return {}

    decoder = json.JSONDecoder(parse_int=read_int, object_pairs_hook=read_object, parse_float=WrittenFloat)
    space = re.compile(r"[ \t\r\n]*")
    position = space.match(text).end() + 1  # type: ignore[union-attr]
    line = 1 + text.count("\n", 0, position)
    while True:
        begin = space.match(text, position).end()  # type: ignore[union-attr]
        line += text.count("\n", position, begin)
        if text[begin : begin + 1] == "]":
            return
        try:
            value, end = decoder.raw_decode(text, begin)
            yield line, faults.pop() if faults else value
            faults.clear()
            position = space.match(text, end).end()  # type: ignore[union-attr]
            line += text.count("\n", begin, position)
            if text[position : position + 1] not in ("]", ","):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, position)
        except RecursionError as error:
            raise DataError(f"data_path {name!r} is nested too deeply at line {line}.") from error
        except json.JSONDecodeError as error:
            raise DataError(
                f"data_path {name!r} is not a valid JSON array: {error.msg} at line {error.lineno}, "
                f"column {error.colno}. Fix it, or write one object per line as *.jsonl, where "
                "a broken line affects only one row."
            ) from error
        position += text[position] == ","


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Refuse a repeated key, because its meaning is unclear."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in made if keys.count(key) > 1)
        raise RowError(f"the key {twice!r} occurs twice in one object")
    return made


def _csv_rows(name: str, content: bytes) -> Iterator[Record]:
    """Yield the rows of a CSV file with a header line. Each row must have as many fields as the header.

    The separator is a comma, unless the header has more semicolons, tabs or bars than commas.
    """
    csv.field_size_limit(_MAX_CSV_FIELD)
    text = content.decode("utf-8", errors="surrogateescape")
    lines = io.StringIO(text, newline="").readlines()
    names = re.sub(r'"[^"]*"', "", next((line for line in lines if line.strip()), ""))
    records = _csv_records(lines, max(_DELIMITERS, key=names.count))
    _, header = next(records, (1, []))
    if isinstance(header, str):
        raise DataError(f"the first line of {name!r}, which names the columns, is {header}.")
    twice = sorted({column for column in header if column and header.count(column) > 1})
    if twice:
        raise DataError(f"{name!r} has the column {' and '.join(map(repr, twice))} twice. Name each column once.")
    for line, values in records:
        if isinstance(values, str):
            yield line, values
        elif len(values) != len(header):
            yield line, f"{len(values)} fields where the header has {len(header)}"
        elif any(_has_undecodable(value) for value in values):
            yield line, NOT_UTF8
        else:
            yield line, dict(zip(header, values, strict=True))


def _csv_records(lines: list[str], delimiter: str) -> Iterator[tuple[int, list[str] | str]]:
    """Yield the line where each record begins, and its fields or an error about its quotes.

    A quote that is not closed would extend to the end of the file. Reading therefore continues after the first line of
    such a record.
    """
    start = 0
    while start < len(lines):
        reader = csv.reader(itertools.islice(lines, start, None), strict=True, delimiter=delimiter)
        begin = start + 1
        try:
            for values in reader:
                if values:
                    yield begin, values
                begin = start + reader.line_num + 1
            return
        except csv.Error as error:
            yield begin, f"not valid CSV ({error})"
            start = begin


def _has_undecodable(text: str) -> bool:
    return not text.isascii() and any("\udc80" <= character <= "\udcff" for character in text)
