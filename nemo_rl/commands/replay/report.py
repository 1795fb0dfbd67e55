"""Write the result of a comparison as text."""

import os
from collections.abc import Iterator
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_rl.commands.replay.findings import Comparison, Stage

_FILE_WIDTH = 140
"""Width in characters if the output is not a terminal."""
_SHOWN = 3


def write_text(result: Comparison, output: TextIO) -> None:
    """Write a table with a line for each part of the step, then the differences, the notes and the verdict."""
    is_file = not output.isatty() and "COLUMNS" not in os.environ
    console = Console(file=output, width=_FILE_WIDTH if is_file else None)
    table = Table(box=SIMPLE_HEAD)
    for title in ("part of the step", "compared", "differ", "largest difference", "tolerance"):
        table.add_column(title, overflow="fold")
    for stage in result.stages:
        table.add_row(*map(Text, _line(stage)))
    console.print(table)
    for line in _details(result):
        console.print(Text(line))
    console.print(Text(result.verdict))


def _line(stage: Stage) -> tuple[str, ...]:
    if stage.skipped is not None:
        return stage.name, "-", "-", stage.skipped, "-"
    if not stage.unit:
        return stage.name, str(stage.compared), str(len(stage.differences)), "-", "-"
    size = f"{stage.largest:.1e} {stage.unit}" if stage.largest else "0"
    return stage.name, str(stage.compared), str(len(stage.differences)), size, f"{stage.tolerance:g}"


def _details(result: Comparison) -> Iterator[str]:
    for stage in result.stages:
        shown = _SHOWN if stage is result.first else 1
        for difference in stage.differences[:shown]:
            yield difference.text if difference.text.startswith(stage.name) else f"{stage.name}: {difference.text}"
        if len(stage.differences) > shown:
            yield f"{stage.name}: and {len(stage.differences) - shown} more"
    for note in result.notes:
        yield f"note: {note}"
