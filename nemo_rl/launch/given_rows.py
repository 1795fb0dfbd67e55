"""Convert the rows that a program passes to the keys of a data set.

    dicts, a `datasets.Dataset`     a file in the run's folder, named after its content
    a path, a hub id, a name        as a configuration names it

Invariant: a value that a file cannot hold is refused with its row and column.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from nemo_rl.config import PREFERENCE_DATASET_NAMES, RESPONSE_DATASET_NAMES
from nemo_rl.config.base.names import PROMPTS
from nemo_rl.files.writing import write_atomically
from nemo_rl.utils.errors import DataError

_KINDS = "Give a list of dicts, a datasets.Dataset, the path of a file, or the name of a data set"
_ANSWERS = ("answer", "completion", "output", "response")


def data_keys(rows: Any, folder: Path, form: str, name: str = "rows") -> dict[str, Any]:
    """Return the keys of a data entry for rows.

    Args:
        rows: dicts, a `datasets.Dataset`, a path, the name of a data set, or a hub id.
        folder: folder of the run, in which rows in memory are written to a file.
        form: kind of rows: `prompt`, `chat` or `pair`.
        name: name of the argument, for messages.

    Raises:
        DataError: the rows are of another kind, or there are none.
    """
    if isinstance(rows, str | Path):
        known = (*RESPONSE_DATASET_NAMES, *PREFERENCE_DATASET_NAMES)
        return {"dataset_name": str(rows)} if rows in known else {**_entry(form, ()), "data_path": str(rows)}
    path, columns = _stored(rows, folder, name)
    return {**_entry(form, columns), "data_path": str(path)}


def _entry(form: str, columns: Iterable[str]) -> dict[str, Any]:
    """Return the keys that read rows with these columns, or the usual keys if no columns are given."""
    if form == "prompt":
        return {"dataset_name": PROMPTS}
    if form == "pair":
        return {"dataset_name": "BinaryPreferenceDataset"}
    present = set(columns)
    answer = next((column for column in _ANSWERS if column in present), None)
    if "prompt" in present and "messages" not in present and answer is not None:
        return {"dataset_name": "ResponseDataset", "input_key": "prompt", "output_key": answer}
    return {"dataset_name": "openai_format"}


def _stored(rows: Any, folder: Path, name: str) -> tuple[Path, list[str]]:
    """Write rows to a file and return it with the columns of the first row."""
    if hasattr(rows, "to_parquet") and hasattr(rows, "column_names"):
        if not len(rows):
            raise DataError(f"{name} is a data set without rows. {_KINDS}.")
        columns = list(rows.column_names)
        return _write(folder, name, (_line(dict(row), number, name) for number, row in enumerate(rows))), columns
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        raise DataError(f"{name} is a {type(rows).__name__}. {_KINDS}.")
    given = iter(rows)
    first = next(given, None)
    if first is None:
        raise DataError(f"{name} is empty. {_KINDS}.")
    lines = (_line(row, number, name) for number, row in enumerate(chain([first], given)))
    return _write(folder, name, lines), list(first) if isinstance(first, Mapping) else []


def _write(folder: Path, name: str, lines: Iterator[str]) -> Path:
    texts = list(lines)
    digest = hashlib.sha256("".join(texts).encode("utf-8", "surrogatepass")).hexdigest()[:12]
    path = folder / "data" / f"{name}-{digest}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, texts)
    return path


def _line(row: Any, number: int, name: str) -> str:
    if not isinstance(row, Mapping):
        raise DataError(f"{name}[{number}] is a {type(row).__name__}, not a dict of columns.")
    try:
        return json.dumps(dict(row), ensure_ascii=True, allow_nan=False, default=_plain) + "\n"
    except (TypeError, ValueError):
        column = next((key for key, value in row.items() if not _fits(value)), "?")
        raise DataError(
            f"{name}[{number}] has {row.get(column)!r:.80} in the column {column!r}, which JSON cannot hold. "
            "Use texts, finite numbers, true/false, lists and dicts."
        ) from None


def _plain(value: Any) -> Any:
    """Convert a scalar of NumPy or torch to a number, and an array to a list."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError


def _fits(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False, default=_plain)
    except (TypeError, ValueError):
        return False
    return True
