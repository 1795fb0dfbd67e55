"""Write new rewards to a file, and show how they differ from the stored ones."""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_rl.commands.regrade.replay import Regraded
from nemo_rl.data.messages.content import content_text
from nemo_rl.files.writing import write_atomically
from nemo_rl.utils.errors import ConfigError

_FILE_WIDTH = 140
"""Width in characters if the output is not a terminal."""
_NUM_SHOWN = 8
_ANSWER_CHARS = 60
_TOLERANCE = 1e-6
"""Largest difference of rewards that count as equal; stored rewards have all digits, grouped sums may differ."""


def refuse_existing(file: Path) -> None:
    """Check that a file can be written as a new one.

    Raises:
        ConfigError: it exists, or its folder does not.
    """
    if file.exists():
        raise ConfigError(f"{file} exists, and rewards are only written to a new file. Choose another with --output.")
    if not file.parent.is_dir():
        raise ConfigError(f"{file.parent} is no folder. Choose another file with --output.")


def write_file(file: Path, samples: Iterable[Regraded]) -> None:
    """Write one line for each sample."""
    write_atomically(file, (json.dumps(_line(each), ensure_ascii=False) + "\n" for each in samples))


def _line(each: Regraded) -> dict[str, object]:
    stored = each.sample.row
    return {
        "file": each.sample.file.name,
        "line": each.sample.line,
        **{key: stored.get(key) for key in ("idx", "group", "sample", "task_name")},
        "environment": each.environment,
        "stored_reward": each.sample.reward,
        "reward": each.reward,
        "reward_components": each.components,
        "penalized_reward": each.penalized_reward,
        "penalties": each.penalties,
        "error": each.error,
        "diverged": each.diverged,
    }


def is_changed(each: Regraded) -> bool:
    """Return whether the reward differs from the stored one; no reward differs from any."""
    old, new = each.sample.reward, each.reward
    if old is None or new is None:
        return old is not new
    return abs(old - new) > _TOLERANCE


def write_tables(samples: Sequence[Regraded]) -> None:
    """Write a line for each file, the most frequent changes and the largest ones to standard output."""
    is_file = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = Console(file=sys.stdout, width=_FILE_WIDTH if is_file else None)
    columns = ("file", "samples", "changed", "mean before", "mean now", "no reward before", "no reward now", "diverged")
    console.print(_table(columns, _file_lines(samples)))
    changed = [each for each in samples if is_changed(each)]
    if changed:
        counted = Counter((_text(each.sample.reward), _text(each.reward)) for each in changed)
        lines = [(before, now, str(number)) for (before, now), number in counted.most_common(_NUM_SHOWN)]
        console.print(_table(("before", "now", "samples"), lines))
        largest = sorted(changed, key=_size, reverse=True)[:_NUM_SHOWN]
        titles = ("sample", "before", "now", "answer, or why there is no reward")
        console.print(_table(titles, map(_change_line, largest)))
    console.print(Text(f"{len(changed)} of {len(samples)} rewards changed."))
    reviewed = [each for each in samples if each.penalties is not None]
    if reviewed:
        before = sum(any((each.sample.row.get("penalties") or {}).values()) for each in reviewed)
        now = sum(any((each.penalties or {}).values()) for each in reviewed)
        console.print(Text(f"{now} of {len(reviewed)} training samples are penalized now, {before} were before."))


def _table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for title in columns:
        table.add_column(title, overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def _file_lines(samples: Sequence[Regraded]) -> Iterator[tuple[str, ...]]:
    for name, group in groupby(samples, key=lambda each: each.sample.file.name):
        found = list(group)
        before, now = [each.sample.reward for each in found], [each.reward for each in found]
        numbers = (len(found), sum(map(is_changed, found)))
        means = (_mean(before), _mean(now))
        missing = (before.count(None), now.count(None), sum(each.diverged is not None for each in found))
        yield (name, *map(str, numbers), *means, *map(str, missing))


def _change_line(each: Regraded) -> tuple[str, ...]:
    why = each.error or _end_of_answer(each)
    return each.sample.place, _text(each.sample.reward), _text(each.reward), why


def _mean(rewards: Sequence[float | None]) -> str:
    known = [reward for reward in rewards if reward is not None]
    return f"{fmean(known):.4f}" if known else "-"


def _text(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:.4g}"


def _size(each: Regraded) -> float:
    """Return the size of a change; a reward that appears or disappears is the largest."""
    old, new = each.sample.reward, each.reward
    return float("inf") if old is None or new is None else abs(old - new)


def _end_of_answer(each: Regraded) -> str:
    return content_text(each.sample.row["content"][-1]["content"])[-_ANSWER_CHARS:].replace("\n", " ")
