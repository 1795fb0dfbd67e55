"""Write findings as a table or as JSON."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_rl.commands.doctor.checks import Finding, Status

_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "bold red", Status.SKIPPED: "dim"}


_FILE_WIDTH = 160
"""Width in characters if the output is not a terminal."""


def exit_status(findings: Sequence[Finding]) -> int:
    """Return 0 without a failure, or else 1."""
    return int(any(finding.status is Status.FAILED for finding in findings))


def summary(findings: Sequence[Finding]) -> dict[str, int]:
    """Return the number of findings of each status."""
    return {str(status): sum(finding.status is status for finding in findings) for status in Status}


def write_json(findings: Sequence[Finding]) -> None:
    """Write one object to standard output."""
    content = {"counts": summary(findings), "findings": [asdict(finding) for finding in findings]}
    sys.stdout.write(json.dumps(content, indent=2) + "\n")


def standard_output() -> Console:
    """Return a console for standard output, which is wide if the output is not a terminal."""
    is_file = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(file=sys.stdout, width=_FILE_WIDTH if is_file else None)


def write_table(findings: Sequence[Finding]) -> None:
    """Write one line per finding, then the details, then the counts, to standard output."""
    console = standard_output()
    with_nodes = any(finding.node for finding in findings)
    table = Table(box=SIMPLE_HEAD)
    for title in ("check", *(["node"] if with_nodes else []), "status", "found", "what to do"):
        table.add_column(title, no_wrap=title in ("check", "status"), overflow="fold")
    for finding in findings:
        cells = [Text(finding.check), Text(finding.status, style=_STYLES[finding.status])]
        cells += [Text(finding.found), Text(finding.advice)]
        table.add_row(*(cells[:1] + [Text(finding.node)] * with_nodes + cells[1:]))
    console.print(table)
    for finding in findings:
        if finding.details and finding.status is not Status.OK:
            console.print(Text(f"{finding.check} {finding.node}".strip(), style="bold"))
            console.print(Text(finding.details))
    console.print(Text(", ".join(f"{count} {name}" for name, count in summary(findings).items())))
