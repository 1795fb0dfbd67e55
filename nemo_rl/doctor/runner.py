"""Performs checks one after the other: a deadline for each, and a finding whatever happens.

Invariant: one check's failure keeps only those from running that need it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from nemo_rl.doctor.checks import Check, Finding, Status, ok, skipped
from nemo_rl.host.background import in_background
from nemo_rl.utils.errors import NemoRLError

_REPORT_IT = "A defect of this check or of what it calls: report it with the output of --json."


def perform[Given](
    checks: Iterable[Check[Given]],
    given: Given,
    before: Iterable[Finding] = (),
    tell: Callable[[str], object] = lambda name: None,
) -> list[Finding]:
    """Perform checks in their order.

    Args:
        checks: what to look at.
        given: what each check is told.
        before: findings of earlier checks, which these may need.
        tell: called with the name of each check before it starts.
    """
    failed = {finding.check for finding in before if finding.status is Status.FAILED}
    findings: list[Finding] = []
    for check in checks:
        missing = [name for name in check.needs if name in failed]
        if missing:
            finding = skipped(f"needs {', '.join(map(repr, missing))} to pass first")
        else:
            tell(check.name)
            finding = _answer(partial(check.look, given), check)
        failed |= {check.name} if finding.status is Status.FAILED or missing else set()
        findings.append(replace(finding, check=check.name))
    return findings


def _answer(look: Callable[[], Finding], check: Check) -> Finding:
    """What a check finds within its deadline."""
    future = in_background(look, f"doctor: {check.name}")
    try:
        error = future.exception(check.deadline_s)
    except NoAnswer:
        return Finding(Status.FAILED, f"no answer in {check.deadline_s:g} s", "Look for what it waits for, see above.")
    return future.result() if error is None else refusal(error)


def refusal(error: BaseException, advice: str = "") -> Finding:
    """The finding that an error is; the library's own errors say what to do themselves."""
    notes = getattr(error, "__notes__", [])
    if isinstance(error, NemoRLError):
        return Finding(Status.FAILED, "\n".join([str(error), *notes]), advice)
    return Finding(Status.FAILED, "\n".join([f"{type(error).__name__}: {error}", *notes]), advice or _REPORT_IT)


def as_the_run_says(call: Callable[[], str], advice: str = "") -> Finding:
    """Make a check that a run makes at its start, in this process.

    Args:
        call: the run's own check; returns what there is.
        advice: what to do about an error or a warning, beside what it says itself.

    Returns:
        A failure where the run would refuse to start, a warning where it would warn.
    """
    with warnings_of_library() as said:
        try:
            found = call()
        except NemoRLError as error:
            return refusal(error, advice)
    return Finding(Status.WARNING, "\n".join(said), advice) if said else ok(found)


@contextmanager
def warnings_of_library() -> Iterator[list[str]]:
    """Collect what the library would log as a warning; nothing of it reaches the console, or a collection around it."""
    library = logging.getLogger("nemo_rl")
    said: list[str] = []
    before = library.handlers, library.propagate
    library.handlers, library.propagate = [_Collector(said)], False
    try:
        yield said
    finally:
        library.handlers, library.propagate = before


class _Collector(logging.Handler):
    """Keeps the texts of warnings and errors."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record."""
        self._said.append(record.getMessage())


def smallest(findings: Iterable[Finding], number: str) -> float | None:
    """The smallest of a number that several machines measured; None where none did."""
    return min((f.numbers[number] for f in findings if number in f.numbers), default=None)
