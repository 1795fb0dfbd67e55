"""Find the stored samples of a run without keeping them in memory.

    files of samples ── read ──► a table on disk: a few values and a short text for each sample
    SampleQuery ── select ──► one page of it;  detail(number) ──► the sample's line in its file

Invariant: memory does not grow with the number of samples. A line that is no sample is left out and counted.
"""

import logging
import os
import sqlite3
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nemo_rl.commands.report.run_files import RunFiles, finite
from nemo_rl.commands.report.sample_lines import COLUMNS, Scalar, detail_of, sample_files, summary_of, training_file
from nemo_rl.commands.report.sample_query import SampleQuery
from nemo_rl.files.regular_file import open_regular

logger = logging.getLogger(__name__)

READ_ERRORS = (OSError, sqlite3.Error, ValueError, OverflowError, RecursionError)
"""Errors of a full disk, and of files that are gone, damaged or written by a stranger."""
_LARGEST_EXACT = 2**53
CHOICES = ("phase", "outcome", "task")
"""Columns whose values a page offers as filters."""
_NUMBERS = {"step", "group", "sample", "branch", "idx", "reward", "length", "turns"}
_TABLE = ", ".join(f'"{name}" {"NUMERIC" if name in _NUMBERS else "TEXT"}' for name in COLUMNS)
_SHOWN = ", ".join(f'"{name}"' for name in COLUMNS)

State = tuple[int, int]
"""Time and size of a file."""


class _Read(NamedTuple):
    """A file that was read: its state then, and its lines that are no samples."""

    state: State
    num_damaged: int


@dataclass
class SampleIndex:
    """All samples of a run; for one thread at a time."""

    run: RunFiles
    last_step: int | None = None
    """The last step whose training samples are shown; a run that went back to an earlier checkpoint leaves those of
    later steps until it writes them again. None: all."""
    error: str | None = None
    """Why a file could not be read at the last reading; None if each could."""
    has_more: bool = False
    """Whether the last reading left files for the next one."""
    _read: dict[Path, _Read] = field(default_factory=dict)
    _known: dict[int | None, dict[str, Any]] = field(default_factory=dict)
    """`known` and `choices` by the last step, until the next reading."""
    _table: sqlite3.Connection = field(init=False)

    def __post_init__(self) -> None:
        # A file without a name is on disk, and is removed when the process ends.
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
        """Samples that are shown; fast while nothing is read."""
        return int(self._known_now()["known"])

    @property
    def _valid(self) -> str:
        """A condition of SQL: the run has not taken back the sample's step."""
        return "1" if self.last_step is None else f"(phase != 'train' OR step <= {int(self.last_step)})"

    def is_newer(self, step: int, time: float) -> bool:
        """Return whether the training samples of a step were written after a time, in seconds since 1970."""
        read = self._read.get(self.run.folder / training_file(step))
        return read is not None and read.state[0] > time * 1e9

    @property
    def num_damaged(self) -> int:
        """Lines that are no samples."""
        return sum(file.num_damaged for file in self._read.values())

    def read(self, most: int | None = None) -> bool:
        """Read new files, which are always complete; return whether there were any.

        A run that restarts writes the files of steps again; their samples replace the earlier ones. A file that cannot
        be read keeps what was read of it before, and is tried again the next time.

        Args:
            most: largest number of files to read; None: all.
        """
        num_read, error, self.has_more = 0, None, False
        for step, phase, path in sample_files(self.run.folder):
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
        with self._table:  # all of it or nothing
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
        """Choose whole groups evenly over the steps of each phase; a sample without a group is one of its own.

        Args:
            most: number of samples; if not even one group has so few, the first is cut.
            among: numbers of samples to choose from; None: all.

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
            OSError, ValueError: its file is gone, or was written again by a run that restarted.
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
    """Return the members of groups that are evenly spaced, as many as there is room for."""
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
    """Return a row for a browser, which rounds whole numbers above 2^53; the table makes "1e999" infinite."""
    values = (finite(value) if isinstance(value, float) else value for value in row)
    return [str(value) if isinstance(value, int) and abs(value) > _LARGEST_EXACT else value for value in values]


def _state(file: Path | int) -> State:
    """Return the state of a file or of an open one; (0, 0) if it is gone."""
    try:
        found = os.stat(file)
    except OSError:
        return (0, 0)
    return found.st_mtime_ns, found.st_size
