"""Find the stored samples of a run without keeping them in memory, and read single ones.

Invariant: the index has a few numbers and a short text for each sample, whatever its length; a line that is no sample
is left out and counted.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.report.run_files import RunFiles, read_json

_FILE = re.compile(r"(train|val)_data_step(\d+)\.jsonl")
_PREVIEW_CHARS = 100
_MAX_TEXT_CHARS = 200_000
"""Characters of one message that a page shows."""
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
"""Names of the values of `SampleIndex.rows`."""
_NUMBERS = ("generation_logprobs", "prev_logprobs", "advantages")
_DECIMALS = 4


@dataclass(frozen=True)
class Place:
    """The line of one sample."""

    file: Path
    offset: int
    size: int


@dataclass
class SampleIndex:
    """All samples of a run, in the order of their files.

    Attributes:
        run: the run.
        rows: values of `COLUMNS`, one list for each sample.
        places: where each sample is.
        num_damaged: lines that are no samples.
    """

    run: RunFiles
    rows: list[list[Any]] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    num_damaged: int = 0
    _read: dict[Path, tuple[int, int]] = field(default_factory=dict)
    """Time and size of the files that were read."""

    def read(self, most: int | None = None) -> bool:
        """Read files that are new, which are complete; return whether there was one.

        A run that restarts writes the files of steps again; their samples replace the earlier ones.

        Args:
            most: number of files; None: all.
        """
        new = [file for file in _sample_files(self.run.folder) if self._read.get(file[2]) != _state(file[2])]
        for step, phase, path in new[:most]:
            if path in self._read:
                self._forget(path)
            self._read[path] = _state(path)
            self._read_file(path, phase, step)
        return bool(new)

    def _forget(self, path: Path) -> None:
        kept = [number for number, place in enumerate(self.places) if place.file != path]
        self.rows[:] = [self.rows[number] for number in kept]
        self.places[:] = [self.places[number] for number in kept]

    def detail(self, number: int) -> dict[str, Any]:
        """Read a sample with its conversation and tokens.

        Raises:
            IndexError: there is no such sample.
            OSError, ValueError: its file is gone, or was written again by a resumed run.
        """
        if number < 0:
            raise IndexError(number)
        place = self.places[number]
        with place.file.open("rb") as file:
            file.seek(place.offset)
            row = read_json(file.read(place.size))
        if not _is_sample(row):
            raise ValueError(f"{place.file.name} has changed")
        return _detail(row)

    def _read_file(self, path: Path, phase: str, step: int) -> None:
        offset = 0
        try:
            with path.open("rb") as file:
                for line in file:
                    start, offset = offset, offset + len(line)
                    summary = _summary(line, phase, step)
                    if summary is None:
                        self.num_damaged += 1
                        continue
                    self.rows.append(summary)
                    self.places.append(Place(path, start, len(line)))
        except OSError:
            self.num_damaged += 1


def chosen_samples(rows: Sequence[Sequence[Any]], most: int) -> list[int]:
    """Choose whole groups whose samples are shown with their tokens, evenly over the steps of each phase.

    Args:
        rows: of a `SampleIndex`.
        most: number of samples.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(tuple(row[:3]), []).append(number)
    largest = max(map(len, groups.values()), default=1)
    count = min(max(most // largest, min(most, 1)), len(groups))
    members = list(groups.values())
    chosen = [number for place in range(count) for number in members[place * len(members) // count]]
    return sorted(chosen)


def _sample_files(folder: Path) -> list[tuple[int, str, Path]]:
    named = ((_FILE.fullmatch(path.name), path) for path in folder.glob("*_data_step*.jsonl"))
    return sorted((int(name[2]), "train" if name[1] == "train" else "validation", path) for name, path in named if name)


def _summary(line: bytes, phase: str, step: int) -> list[Any] | None:
    row = read_json(line)
    if not _is_sample(row):
        return None
    turns = [message for message in row["content"] if message.get("role") == "assistant"]
    last = str(turns[-1].get("content", "")) if turns else ""
    reward, length = row.get("rewards"), row.get("response_length")
    outcome = str(row.get("outcome", ""))
    number = float(reward) if isinstance(reward, int | float) else None
    length = length if isinstance(length, int) else 0
    place = [row.get(name) for name in ("group", "sample", "branch", "idx")]
    about = [str(row.get("task_name", "")), number, outcome, length, len(turns), last[-_PREVIEW_CHARS:]]
    return [phase, step, *place, *about]


def _is_sample(row: Any) -> bool:
    content = row.get("content") if isinstance(row, dict) else None
    return isinstance(content, list) and all(isinstance(message, dict) for message in content)


def _state(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return found.st_mtime_ns, found.st_size


def _detail(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page shows of one sample."""
    messages = [
        {
            "role": str(message.get("role", "")),
            "content": str(message.get("content", ""))[:_MAX_TEXT_CHARS],
            "is_cut": len(str(message.get("content", ""))) > _MAX_TEXT_CHARS,
        }
        for message in row["content"]
    ]
    about = ("branch", "turn_rewards", "reward_components", "penalties", "effort", "ended_by", "error", "answer")
    tokens = dict(_tokens(row)) if isinstance(row.get("token_ids"), list) else {}
    return {"messages": messages, **{name: row.get(name) for name in about}, "tokens": tokens}


def _tokens(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "ids", row["token_ids"]
    yield "mask", row.get("token_loss_mask", [])
    yield "versions", row.get("weight_versions", [])
    for name in _NUMBERS:
        if isinstance(row.get(name), list):
            yield name, [None if value is None else round(value, _DECIMALS) for value in row[name]]
