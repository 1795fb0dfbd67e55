"""Find the stored samples of a run without keeping them in memory, and read a page of them by filters and order.

Samples are lines of files that a run may still be writing.
"""

import json
import logging
import math
import os
import re
import sqlite3
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from nemo_rl.commands.report.images import images_of
from nemo_rl.commands.report.run_files import RunFiles, finite, read_json
from nemo_rl.experience.logged_images import placed
from nemo_rl.files.regular_file import open_regular

Scalar = str | int | float | None

_FILE = re.compile(r"(train|val)_data_step([0-9]{1,18})\.jsonl")
_PREVIEW_CHARS = 100
_MAX_TEXT_CHARS = 200_000
"""Number of characters of one message that a page shows."""
COLUMNS = (
    "phase",
    "step",
    "group",
    "sample",
    "branch",
    "idx",
    "task",
    "reward",
    "outcome",
    "length",
    "turns",
    "preview",
)
"""Names of the values of a summary."""
_NUMBERS = ("generation_logprobs", "prev_logprobs", "advantages", "values", "returns")
_DECIMALS = 4
_LARGEST = 2**63
"""Largest integer in a table. A file with a larger step in its name is not a file of samples."""


def sample_files(folder: Path) -> list[tuple[int, str, Path]]:
    """Return step, phase and path of each file of samples in the order of steps."""
    named = ((_FILE.fullmatch(path.name), path) for path in folder.glob("*_data_step*.jsonl"))
    return sorted((int(name[2]), "train" if name[1] == "train" else "validation", path) for name, path in named if name)


def training_file(step: int) -> str:
    """Return the name of the file with the samples of a training step."""
    return f"train_data_step{step}.jsonl"


def summary_of(line: bytes, phase: str, step: int) -> list[Scalar] | None:
    """Return the values of `COLUMNS` of a sample, or None if the line is not a sample.

    Args:
        phase: phase of the file, "train" or "validation".
    """
    row = read_json(line)
    if not _is_sample(row):
        return None
    turns = [message for message in row["content"] if message.get("role") == "assistant"]
    last = str(turns[-1].get("content", "")) if turns else ""
    reward, length = finite(row.get("rewards")), row.get("response_length")
    length = length if isinstance(length, int) and abs(length) < _LARGEST else 0
    place = [_scalar(row.get(name)) for name in ("group", "sample", "branch", "idx")]
    names = [_scalar(str(row.get(name, ""))) for name in ("task_name", "outcome")]
    return [phase, step, *place, names[0], reward, names[1], length, len(turns), _scalar(last[-_PREVIEW_CHARS:])]


def _scalar(value: Any) -> Scalar:
    """Return a value that a table can store: text without unpaired surrogates, other objects as JSON."""
    if isinstance(value, float):
        return finite(value)
    if value is None or (isinstance(value, int) and abs(value) < _LARGEST):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", "replace").decode()


def _is_sample(row: Any) -> bool:
    content = row.get("content") if isinstance(row, dict) else None
    return isinstance(content, list) and all(isinstance(message, dict) for message in content)


def detail_of(line: bytes) -> dict[str, Any]:
    """Return the page's data of one sample, with its conversation and tokens.

    Raises:
        ValueError: the line is not a sample.
    """
    row = read_json(line)
    if not _is_sample(row):
        raise ValueError("the line is no sample")
    images = images_of(row)
    messages = [
        {
            "role": str(message.get("role", "")),
            "content": text[:_MAX_TEXT_CHARS],
            "is_cut": len(text) > _MAX_TEXT_CHARS,
            **({"images": numbers} if numbers else {}),
        }
        for message, (text, numbers) in zip(row["content"], placed(row["content"], images), strict=True)
    ]
    return {
        "messages": messages,
        **({"images": images} if images else {}),
        **{name: _scalar(row.get(name)) for name in ("branch", "effort", "ended_by", "error", "answer")},
        "turn_rewards": [finite(value) for value in _list(row, "turn_rewards")],
        "reward_components": {name: finite(value) for name, value in _mapping(row, "reward_components").items()},
        "penalties": {name: turns for name, turns in _mapping(row, "penalties").items() if isinstance(turns, list)},
        "tokens": dict(_tokens(row)),
    }


def _tokens(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the columns of tokens, or nothing if the sample has none or has numbers that are not tokens."""
    ids = _list(row, "token_ids")
    if not ids or not all(type(token) is int and token >= 0 for token in ids):
        return
    yield "ids", ids
    yield "mask", _list(row, "token_loss_mask")
    versions = _list(row, "weight_versions")
    yield "versions", versions if all(map(_is_version, versions)) else []
    for name in _NUMBERS:
        if isinstance(row.get(name), list):
            numbers = map(finite, row[name])
            yield name, [None if number is None else round(number, _DECIMALS) for number in numbers]


def _is_version(value: Any) -> bool:
    """Return whether a value is the first token of a version of the weights, and the version."""
    return isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)


def _list(row: Mapping[str, Any], name: str) -> list[Any]:
    value = row.get(name)
    return value if isinstance(value, list) else []


def _mapping(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = row.get(name)
    return value if isinstance(value, dict) else {}


_RANGES = ("step", "reward", "length")
_EQUAL = ("phase", "outcome", "task", "step", "group", "idx")
_MOST_ROWS = 200
_LARGEST_PAGE = 2**62


@dataclass(frozen=True)
class SampleQuery:
    """A query for one page of the samples that match some filters."""

    equal: Mapping[str, str] = field(default_factory=dict)
    """Value that a column must have, by column."""
    least: Mapping[str, float] = field(default_factory=dict)
    """Smallest value of a column, by column."""
    most: Mapping[str, float] = field(default_factory=dict)
    """Largest value of a column, by column."""
    text: str = ""
    """Text that the end of the answer must contain, ignoring case."""
    first_of_step: bool = False
    """Whether only the first matching sample of each step is wanted."""
    sort: str = ""
    """Column to sort by, or "" for the order of steps."""
    descending: bool = False
    """Whether the largest value is first. Samples without a value are always last."""
    offset: int = 0
    """Number of samples before the page."""
    limit: int = 25
    """Largest number of rows of the page."""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> Self:
        """Read the parameters of a request, such as `phase`, `step_from`, `step_to`, `text`, `sort` and `offset`.

        Raises:
            ValueError: a parameter is unknown, or its value has the wrong type.
        """
        given: dict[str, Any] = {"equal": {}, "least": {}, "most": {}}
        for name, value in parameters.items():
            column, _, bound = name.rpartition("_")
            if column in _RANGES and bound in ("from", "to"):
                given["least" if bound == "from" else "most"][column] = _number(name, value)
            elif name in _EQUAL:
                given["equal"][name] = value
            elif name == "text" or (name == "sort" and value in ("", *COLUMNS)):
                given[name] = value
            elif name in ("first_of_step", "descending") and value in ("0", "1"):
                given[name] = value == "1"
            elif name in ("offset", "limit"):
                given[name] = int(_number(name, value))
            else:
                raise ValueError(f"{name}={value!r} is not a filter of samples")
        query = cls(**given)
        if not 0 <= query.offset < _LARGEST_PAGE or not 1 <= query.limit <= _MOST_ROWS:
            raise ValueError(f"offset must be at least 0, and limit from 1 to {_MOST_ROWS}")
        return query

    def conditions(self) -> tuple[str, list[Any]]:
        """Return a condition in SQL, and the values of its placeholders."""
        conditions, values = ["1"], list[Any]()
        for sign, wanted in (("=", self.equal), (">=", self.least), ("<=", self.most)):
            for name, value in wanted.items():
                conditions.append(f'"{name}" {sign} ?')
                values.append(value)
        if self.text:
            conditions.append("has(preview, ?)")
            values.append(self.text.lower())
        return " AND ".join(conditions), values

    def order(self) -> str:
        """Return the order in SQL."""
        by_steps = "step, phase, number"
        if not self.sort:
            return by_steps
        return f'"{self.sort}" IS NULL, "{self.sort}" {"DESC" if self.descending else "ASC"}, {by_steps}'


def _number(name: str, text: str) -> float:
    """Return a finite number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name}={text!r} is no number")
    return number


logger = logging.getLogger(__name__)

READ_ERRORS = (OSError, sqlite3.Error, ValueError, OverflowError, RecursionError)
"""Errors of a full disk, and of files that are missing, damaged or not written by this library."""
_LARGEST_EXACT = 2**53
CHOICES = ("phase", "outcome", "task")
"""Columns whose values a page offers as filters."""
_INDEX_NUMBERS = {"step", "group", "sample", "branch", "idx", "reward", "length", "turns"}
_TABLE = ", ".join(f'"{name}" {"NUMERIC" if name in _INDEX_NUMBERS else "TEXT"}' for name in COLUMNS)
_SHOWN = ", ".join(f'"{name}"' for name in COLUMNS)

State = tuple[int, int]
"""Modification time and size of a file."""


class _Read(NamedTuple):
    """State of a file when it was read, and its lines that are not samples."""

    state: State
    num_damaged: int


@dataclass
class SampleIndex:
    """All samples of a run, for one thread at a time."""

    run: RunFiles
    last_step: int | None = None
    """Last step whose training samples are shown, or None for all. After a return to an earlier checkpoint, samples of
    later steps are hidden until the run writes them again."""
    error: str | None = None
    """Reason why a file could not be read at the last reading, or None if each could be read."""
    has_more: bool = False
    """Whether the last reading left files for the next one."""
    _read: dict[Path, _Read] = field(default_factory=dict)
    _known: dict[int | None, dict[str, Any]] = field(default_factory=dict)
    """Values of `known` and `choices` of `select`, by the last step, kept until the next reading."""
    _table: sqlite3.Connection = field(init=False)

    def __post_init__(self) -> None:
        # A database without a name is a file on disk, which is removed when the process ends.
        self._table = sqlite3.connect("", check_same_thread=False)
        self._table.execute(
            f"CREATE TABLE samples (number INTEGER PRIMARY KEY AUTOINCREMENT, {_TABLE}, file, place, size)"
        )
        self._table.execute("CREATE INDEX by_file ON samples (file)")
        self._table.execute('CREATE INDEX by_group ON samples (step, phase, "group")')
        self._table.execute("CREATE INDEX by_prompt ON samples (idx, phase, step)")
        self._table.create_function("has", 2, lambda text, part: part in str(text).lower(), deterministic=True)

    def __len__(self) -> int:
        return int(self._table.execute(f"SELECT count(*) FROM samples WHERE {self._valid}").fetchone()[0])

    @property
    def num_known(self) -> int:
        """Number of samples that are shown, counted once after each reading."""
        return int(self._known_now()["known"])

    @property
    def _valid(self) -> str:
        """Condition in SQL that is true unless the run has returned to a step before that of the sample."""
        return "1" if self.last_step is None else f"(phase != 'train' OR step <= {int(self.last_step)})"

    def is_newer(self, step: int, time: float) -> bool:
        """Return whether the training samples of a step were written after a time, in seconds since 1970."""
        read = self._read.get(self.run.folder / training_file(step))
        return read is not None and read.state[0] > time * 1e9

    @property
    def num_damaged(self) -> int:
        """Number of lines that are not samples."""
        return sum(file.num_damaged for file in self._read.values())

    def read(self, most: int | None = None) -> bool:
        """Read new files, which are always complete, and return whether there were any.

        A run that restarts writes the files of steps again; their samples replace the earlier ones. If a file cannot be
        read, its earlier content is kept, and the next call tries again.

        Args:
            most: largest number of files to read, or None for all.
        """
        num_read, error, self.has_more = 0, None, False
        for step, phase, path in self._files():
            if path in self._read and self._read[path].state == _state(path):
                continue
            if num_read == most:
                self.has_more = True
                break
            try:
                self._read[path] = self._read_file(path, phase, step)
                num_read += 1
                self._known.clear()
            except READ_ERRORS as problem:
                error = f"{path.name} cannot be read: {problem}"
        if error is not None and error != self.error:
            logger.warning("%s", error)
        self.error = error
        return num_read > 0

    def _files(self) -> list[tuple[int, str, Path]]:
        """Return the files to read, without those of steps that a later folder of the run repeated."""
        files: dict[tuple[int, str], Path] = {}
        for part in self.run.parts:
            first = part.first_step() if files else None
            repeated = [key for key in files if first is not None and key[0] >= first]
            written = sample_files(part.folder)
            for key in {*repeated, *(key[:2] for key in written)} & files.keys():
                self._forget(files.pop(key))
            files |= {(step, phase): path for step, phase, path in written}
        return sorted((step, phase, path) for (step, phase), path in files.items())

    def _forget(self, path: Path) -> None:
        if self._read.pop(path, None) is not None:
            with self._table:
                self._table.execute("DELETE FROM samples WHERE file = ?", (str(path),))
            self._known.clear()

    def _read_file(self, path: Path, phase: str, step: int) -> _Read:
        rows: list[list[Any]] = []
        place = num_damaged = 0
        with open_regular(path) as file:
            state = _state(file.fileno())
            for line in file:
                summary = summary_of(line, phase, step)
                if summary is None:
                    num_damaged += 1
                else:
                    rows.append([*summary, str(path), place, len(line)])
                place += len(line)
        marks = ", ".join("?" * (len(COLUMNS) + 3))
        with self._table:  # a transaction stores all rows of a file or none
            self._table.execute("DELETE FROM samples WHERE file = ?", (str(path),))
            self._table.executemany(f"INSERT INTO samples ({_SHOWN}, file, place, size) VALUES ({marks})", rows)
        return _Read(state, num_damaged)

    def select(self, query: SampleQuery) -> dict[str, Any]:
        """Return the samples that a page asks for.

        Returns:
            `columns`, the first of which is the number for `detail`; `rows` of the page; `total`, the number of samples
            that match the query; `known`, the number of all samples; `choices`, the values of the columns `CHOICES`;
            `num_damaged`.
        """
        where, values = query.conditions()
        where = f"{self._valid} AND {where}"
        of_steps = "number IN (SELECT min(number) FROM samples WHERE " + where + " GROUP BY step)"
        condition, given = (of_steps, values) if query.first_of_step else (where, values)
        chosen = f"SELECT number, {_SHOWN} FROM samples WHERE {condition} ORDER BY {query.order()} LIMIT ? OFFSET ?"
        (total,) = self._table.execute(f"SELECT count(*) FROM samples WHERE {condition}", given).fetchone()
        return {
            "columns": ["number", *COLUMNS],
            "rows": [_shown(row) for row in self._table.execute(chosen, (*given, query.limit, query.offset))],
            "total": total,
            **self._known_now(),
            "num_damaged": self.num_damaged,
        }

    def _known_now(self) -> dict[str, Any]:
        if self.last_step not in self._known:
            choices = {name: self._values_of(name) for name in CHOICES}
            self._known[self.last_step] = {"known": len(self), "choices": choices}
        return self._known[self.last_step]

    def _values_of(self, name: str) -> list[str]:
        values = f'SELECT DISTINCT "{name}" FROM samples WHERE {self._valid} ORDER BY 1'
        return [value for (value,) in self._table.execute(values)]

    def rows_of(self, numbers: Sequence[int]) -> list[list[Any]]:
        """Return number and summary of some samples, in the order of steps."""
        chosen = f"SELECT number, {_SHOWN} FROM samples WHERE {self._valid} ORDER BY step, phase, number"
        wanted = set(numbers)
        return [_shown(row) for row in self._table.execute(chosen) if row[0] in wanted]

    def chosen(self, most: int, among: Sequence[int] | None = None) -> list[int]:
        """Choose whole groups evenly over the steps of each phase, where a sample without a group is a group by itself.

        Args:
            most: largest number of samples. If every group has more, the first group is cut.
            among: numbers of samples to choose from, or None for all.

        Returns:
            Numbers of samples.
        """
        allowed = None if among is None else set(among)
        groups: dict[tuple[Any, ...], list[int]] = {}
        for number, group, *place in self._table.execute(
            f'SELECT number, "group", phase, step FROM samples WHERE {self._valid} ORDER BY phase, step, number'
        ):
            if allowed is None or number in allowed:
                own = number if group is None else None
                groups.setdefault((*place, group, own), []).append(number)
        return sorted(_spread(list(groups.values()), most))

    def detail(self, number: int) -> dict[str, Any]:
        """Read a sample with its conversation and tokens.

        Raises:
            IndexError: there is no such sample.
            OSError, ValueError: its file is missing, or was written again by a restarted run.
        """
        found = self._table.execute("SELECT file, place, size FROM samples WHERE number = ?", (number,)).fetchone()
        if found is None:
            raise IndexError(number)
        path, place, size = found
        with open_regular(path) as file:
            if _state(file.fileno()) != self._read[Path(path)].state:
                raise ValueError("the file was written again")
            file.seek(place)
            return detail_of(file.read(size))


def _spread(groups: list[list[int]], room: int) -> list[int]:
    """Return evenly spaced members of groups, as many as fit."""
    chosen: list[int] = []
    rest = [group for group in groups if len(group) <= room]
    if not rest and groups:
        return groups[0][:room]
    while rest:
        count = bisect_right(range(1, len(rest) + 1), room, key=lambda count: sum(map(len, _spaced(rest, count))))
        taken = _spaced(rest, count)
        chosen += [number for group in taken for number in group]
        room -= sum(map(len, taken))
        known = {group[0] for group in taken}
        rest = [group for group in rest if len(group) <= room and group[0] not in known]
    return chosen


def _spaced(groups: list[list[int]], count: int) -> list[list[int]]:
    return [groups[place * len(groups) // count] for place in range(count)]


def _shown(row: Sequence[Scalar]) -> list[Scalar]:
    """Return a row that a browser reads exactly, with integers above 2^53 as texts and infinite values as None."""
    values = (finite(value) if isinstance(value, float) else value for value in row)
    return [str(value) if isinstance(value, int) and abs(value) > _LARGEST_EXACT else value for value in values]


def _state(file: Path | int) -> State:
    """Return the state of a file or of an open file, or (0, 0) if it is missing."""
    try:
        found = os.stat(file)
    except OSError:
        return (0, 0)
    return found.st_mtime_ns, found.st_size
