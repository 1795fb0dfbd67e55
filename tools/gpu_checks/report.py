"""What a run of the checks found: rows, as a table and as JSON.

Imports nothing but the standard library, so that the process that watches the others starts at once and cannot break
with them. Invariant: every check that was asked for has at least one row, however it ended.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

type Figures = dict[str, float | int | str | None]
"""Values by name; a name ends with the unit where there is one."""
Kind = Literal["correctness", "speed"]
Status = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """What a check says about one thing.

    Attributes:
        name: what was looked at.
        figures: what was measured.
        problem: what is wrong; empty where nothing is.
    """

    name: str
    figures: Figures
    problem: str = ""


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Attributes:
        check: the check it comes from.
        name: what was looked at.
        kind: whether it says that something is right, or how fast it is.
        status: how it ended.
        figures: what was measured.
        reason: why it failed or was skipped.
        trace: traceback of the exception behind the reason.
        seconds: since the row before it.
    """

    check: str
    name: str
    kind: Kind
    status: Status
    figures: Figures = field(default_factory=dict)
    reason: str = ""
    trace: str = ""
    seconds: float = 0.0


@dataclass
class Report:
    """All rows of a run.

    Attributes:
        machine: device, versions and memory.
        rows: in the order they were found.
        seconds: the whole run.
    """

    machine: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    def failures(self) -> list[Row]:
        """Correctness rows that failed; speed that could not be measured is no fault of the code's results."""
        return [row for row in self.rows if row.kind == "correctness" and row.status == "failed"]

    def write_json(self, path: Path) -> None:
        """Write the report; a file that is there is replaced as a whole."""
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    def summary(self) -> str:
        """One line: how many rows ended how, and after which time."""
        count = {status: sum(row.status == status for row in self.rows) for status in ("ok", "failed", "skipped")}
        return f"{count['ok']} ok, {count['failed']} failed, {count['skipped']} skipped in {self.seconds:.0f} s"


def table_line(row: Row) -> str:
    """The row for a terminal, with its reason on a second line."""
    figures = "  ".join(f"{name}={_shown(value)}" for name, value in row.figures.items())
    line = f"{row.status:8}{row.kind[:7]:9}{row.check + ': ' + row.name:66} {figures}".rstrip()
    return f"{line}\n{'':17}{row.reason}" if row.reason else line


def machine_lines(machine: dict[str, Any]) -> Sequence[str]:
    """The facts about the machine, one per line."""
    return [f"{name}: {_shown(value)}" for name, value in machine.items()]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
