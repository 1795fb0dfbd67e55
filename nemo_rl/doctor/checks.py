"""What a check is, and what it says."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        status: how the check ended.
        found: what there is.
        advice: what to do about it; empty where nothing is to be done.
        details: more lines for people, below the table.
        numbers: what was measured, by name with its unit, for later checks and `--json`.
        check: name of the check; the runner writes it.
        node: address of the machine, empty for this one.
    """

    status: Status
    found: str
    advice: str = ""
    details: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    check: str = ""
    node: str = ""


def ok(found: str, **more: str | Mapping[str, float]) -> Finding:
    """Nothing is wrong."""
    return Finding(Status.OK, found, **more)  # type: ignore[arg-type]


def skipped(found: str) -> Finding:
    """There is nothing to check, or it cannot be checked here."""
    return Finding(Status.SKIPPED, found)


@dataclass(frozen=True)
class Check[Given]:
    """One thing to look at.

    Attributes:
        name: as the report shows it.
        look: looks at what it is given; may raise anything.
        deadline_s: seconds after which it has failed.
        needs: names of checks without whose success it cannot be made.
    """

    name: str
    look: Callable[[Given], Finding]
    deadline_s: float = 30.0
    needs: tuple[str, ...] = ()
