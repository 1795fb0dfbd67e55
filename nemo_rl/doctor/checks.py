"""Define a check and its result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        status: result of the check.
        found: what the check found.
        advice: what to do about it; empty if nothing needs to be done.
        details: further lines for people, shown below the table.
        numbers: measured values by name with unit, for later checks and `--json`.
        check: name of the check, set by the runner.
        node: address of the machine; empty for this one.
    """

    status: Status
    found: str
    advice: str = ""
    details: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    check: str = ""
    node: str = ""


def ok(found: str, **more: str | Mapping[str, float]) -> Finding:
    """Return a finding of a passed check."""
    return Finding(Status.OK, found, **more)  # type: ignore[arg-type]


def skipped(found: str) -> Finding:
    """Return a finding of a check that does not apply or cannot be made here."""
    return Finding(Status.SKIPPED, found)


@dataclass(frozen=True)
class Check[Given]:
    """One check.

    Attributes:
        name: name in the report.
        look: inspects its argument and returns a finding; may raise any error.
        deadline_s: seconds after which the check has failed.
        needs: names of checks that must not have failed before this one runs.
    """

    name: str
    look: Callable[[Given], Finding]
    deadline_s: float = 30.0
    needs: tuple[str, ...] = ()
