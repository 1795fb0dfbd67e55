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
    """One line of the report."""

    status: Status
    """Result of the check."""
    found: str
    """The text of the finding."""
    advice: str = ""
    """The remedy; empty if nothing needs to be done."""
    details: str = ""
    """Further lines for people, shown below the table."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Measured values by name with unit, for later checks and `--json`."""
    check: str = ""
    """Name of the check, set by the runner."""
    node: str = ""
    """Address of the machine; empty for this one."""


def ok(found: str, **more: str | Mapping[str, float]) -> Finding:
    """Return a finding of a passed check."""
    return Finding(Status.OK, found, **more)  # type: ignore[arg-type]


def skipped(found: str) -> Finding:
    """Return a finding of a check that does not apply or cannot be made here."""
    return Finding(Status.SKIPPED, found)


@dataclass(frozen=True)
class Check[Given]:
    """One check."""

    name: str
    """Name in the report."""
    look: Callable[[Given], Finding]
    """Inspects its argument and returns a finding; may raise any error."""
    deadline_s: float = 30.0
    """Seconds after which the check has failed."""
    needs: tuple[str, ...] = ()
    """Names of checks that must not have failed before this one runs."""
