"""Find the stored samples of a run without keeping them in memory.

    files of samples ── read ──► a table on disk: a few values and a short text for each sample
    SampleQuery ── select ──► one page of it;  detail(number) ──► the sample's line in its file

Invariant: memory does not grow with the number of samples. A line that is no sample is left out and counted.
"""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.report.run_files import RunFiles
from nemo_rl.report.sample_lines import COLUMNS, detail_of, sample_files, summary_of
from nemo_rl.report.sample_query import SampleQuery

CHOICES = ("phase", "outcome", "task")
"""Columns whose values a page offers as filters."""
_NUMBERS = {"step", "group", "sample", "branch", "idx", "reward", "length", "turns"}
_TABLE = ", ".join(f'"{name}" {"NUMERIC" if name in _NUMBERS else "TEXT"}' for name in COLUMNS)
_SHOWN = ", ".join(f'"{name}"' for name in COLUMNS)


@dataclass
class SampleIndex:
    """All samples of a run; for one thread at a time.

    Attributes:
        run: the run.
        num_damaged: lines that are no samples.
    """

    run: RunFiles
    num_damaged: int = 0
    _read: dict[Path, tuple[int, int]] = field(default_factory=dict)
    """Time and size of the files that were read."""
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
        return int(self._table.execute("SELECT count(*) FROM samples").fetchone()[0])

    def read(self, most: int | None = None) -> bool:
        """Read new files, which are always complete; return whether there were any.

        A run that restarts writes the files of some steps again. Their samples replace the earlier ones.

        Args:
            most: largest number of files to read; None: all.
        """
        new = [file for file in sample_files(self.run.folder) if self._read.get(file[2]) != _state(file[2])]
        for step, phase, path in new[:most]:
            self._table.execute("DELETE FROM samples WHERE file = ?", (str(path),))
            self._read[path] = _state(path)
            self._read_file(path, phase, step)
        return bool(new)

    def _read_file(self, path: Path, phase: str, step: int) -> None:
        rows: list[list[Any]] = []
        place = 0
        try:
            with path.open("rb") as file:
                for line in file:
                    summary = summary_of(line, phase, step)
                    if summary is None:
                        self.num_damaged += 1
                    else:
                        rows.append([*summary, str(path), place, len(line)])
                    place += len(line)
        except OSError:
            self.num_damaged += 1
        marks = ", ".join("?" * (len(COLUMNS) + 3))
        self._table.executemany(f"INSERT INTO samples ({_SHOWN}, file, place, size) VALUES ({marks})", rows)
        self._table.commit()

    def select(self, query: SampleQuery) -> dict[str, Any]:
        """Return the samples that a page asks for.

        Returns:
            `columns`, the first of which is the number for `detail`; `rows` of the page; `total`, the number of samples
            that match the query; `known`, the number of all samples; `choices`, the values of the columns `CHOICES`;
            `num_damaged`.
        """
        where, values = query.conditions()
        of_steps = "number IN (SELECT min(number) FROM samples WHERE " + where + " GROUP BY step)"
        condition, given = (of_steps, values) if query.first_of_step else (where, values)
        chosen = f"SELECT number, {_SHOWN} FROM samples WHERE {condition} ORDER BY {query.order()} LIMIT ? OFFSET ?"
        (total,) = self._table.execute(f"SELECT count(*) FROM samples WHERE {condition}", given).fetchone()
        return {
            "columns": ["number", *COLUMNS],
            "rows": [list(row) for row in self._table.execute(chosen, (*given, query.limit, query.offset))],
            "total": total,
            "known": len(self),
            "choices": {name: self._values_of(name) for name in CHOICES},
            "num_damaged": self.num_damaged,
        }

    def _values_of(self, name: str) -> list[str]:
        return [value for (value,) in self._table.execute(f'SELECT DISTINCT "{name}" FROM samples ORDER BY 1')]

    def rows_of(self, numbers: Sequence[int]) -> list[list[Any]]:
        """Return number and summary of some samples, in the order of steps."""
        chosen = f"SELECT number, {_SHOWN} FROM samples ORDER BY step, phase, number"
        wanted = set(numbers)
        return [list(row) for row in self._table.execute(chosen) if row[0] in wanted]

    def chosen(self, most: int, among: Sequence[int] | None = None) -> list[int]:
        """Choose whole groups evenly over the steps of each phase.

        Args:
            most: number of samples.
            among: numbers of samples to choose from; None: all.

        Returns:
            Numbers of samples.
        """
        allowed = None if among is None else set(among)
        groups: dict[tuple[Any, ...], list[int]] = {}
        for number, *place in self._table.execute(
            'SELECT number, phase, step, "group" FROM samples ORDER BY phase, step, number'
        ):
            if allowed is None or number in allowed:
                groups.setdefault(tuple(place), []).append(number)
        largest = max(map(len, groups.values()), default=1)
        count = min(max(most // largest, min(most, 1)), len(groups))
        members = list(groups.values())
        return sorted(number for place in range(count) for number in members[place * len(members) // count])

    def detail(self, number: int) -> dict[str, Any]:
        """Read a sample with its conversation and tokens.

        Raises:
            IndexError: there is no such sample.
            OSError, ValueError: its file was removed, or a resumed run has written it again.
        """
        found = self._table.execute("SELECT file, place, size FROM samples WHERE number = ?", (number,)).fetchone()
        if found is None:
            raise IndexError(number)
        path, place, size = found
        with open(path, "rb") as file:
            file.seek(place)
            return detail_of(file.read(size))


def _state(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return found.st_mtime_ns, found.st_size
