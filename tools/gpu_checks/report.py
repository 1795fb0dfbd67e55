"""Report the results of the checks as a table and as JSON.

Only the standard library is imported, so that the supervising process starts immediately and cannot fail together with
the others. Invariant: every requested check has at least one row, however it ended.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

type Figures = dict[str, float | int | str | None]
"""Values by name; a name ends with its unit if it has one."""
Kind = Literal["correctness", "speed"]
Status = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """Result of a check about one subject.

    Attributes:
        name: subject of the finding.
        figures: measured values.
        problem: description of the error; empty if there is none.
    """

    name: str
    figures: Figures
    problem: str = ""


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Attributes:
        check: name of the check.
        name: subject of the row.
        kind: whether the row is about correctness or speed.
        status: how the check ended.
        figures: measured values.
        reason: why it failed or was skipped.
        trace: traceback of the exception that is the reason.
        seconds: seconds since the previous row.
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
        rows: rows in the order of the findings.
        seconds: duration of the whole run.
    """

    machine: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    def failures(self) -> list[Row]:
        """Return the failed correctness rows; a failed speed measurement does not mean wrong results."""
        return [row for row in self.rows if row.kind == "correctness" and row.status == "failed"]

    def write_json(self, path: Path) -> None:
        """Write the report; an existing file is replaced as a whole."""
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    def summary(self) -> str:
        """Return one line with the number of rows by status and the duration."""
        count = {status: sum(row.status == status for row in self.rows) for status in ("ok", "failed", "skipped")}
        return f"{count['ok']} ok, {count['failed']} failed, {count['skipped']} skipped in {self.seconds:.0f} s"


def table_line(row: Row) -> str:
    """Format the row for a terminal, with its reason on a second line."""
    figures = "  ".join(f"{name}={_shown(value)}" for name, value in row.figures.items())
    line = f"{row.status:8}{row.kind[:7]:9}{row.check + ': ' + row.name:66} {figures}".rstrip()
    return f"{line}\n{'':17}{row.reason}" if row.reason else line


def machine_lines(machine: dict[str, Any]) -> Sequence[str]:
    """Format the facts about the machine, one per line."""
    return [f"{name}: {_shown(value)}" for name, value in machine.items()]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
