"""Run checks one after the other, each with a deadline, and turn their errors into findings.

Invariant: a failed check skips only those checks that need it.
"""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import replace
from functools import partial

from nemo_rl.commands.doctor.checks import Check, Finding, Status, ok, skipped
from nemo_rl.host.boundary import in_background
from nemo_rl.launch.checks import Passed, logs_of_library
from nemo_rl.utils.errors import NemoRLError
from nemo_rl.utils.logging_setup import with_details

_REPORT_IT = "This is a bug in the check or in the code it calls: report it with the output of --json."


def perform[Given](
    checks: Iterable[Check[Given]],
    given: Given,
    before: Iterable[Finding] = (),
    tell: Callable[[str], object] = lambda name: None,
) -> list[Finding]:
    """Run checks in their order.

    Args:
        given: argument of each check.
        before: findings of earlier checks, on which these may depend.
        tell: function that is called with the name of each check before it starts.
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
    """Return the finding of a check, or a failure at its deadline."""
    future = in_background(look, f"doctor: {check.name}")
    try:
        error = future.exception(check.deadline_s)
    except NoAnswer:
        return Finding(Status.FAILED, f"no answer in {check.deadline_s:g} s", "Look for the cause in the output above.")
    return future.result() if error is None else refusal(error)


def refusal(error: BaseException, advice: str = "") -> Finding:
    """Convert an error into a finding, with advice to report it if it is not an error of the library."""
    notes = getattr(error, "__notes__", [])
    if isinstance(error, NemoRLError):
        return Finding(Status.FAILED, "\n".join([str(error), *notes]), advice)
    return Finding(Status.FAILED, "\n".join([f"{type(error).__name__}: {error}", *notes]), advice or _REPORT_IT)


def as_the_run_says(call: Callable[[], Passed], advice: str = "") -> Finding:
    """Make a check of a run's start in this process.

    Args:
        call: the run's own check.
        advice: what to do about an error or a warning, in addition to its own message.

    Returns:
        A failure if the run would refuse to start, a warning if it would warn; its other log lines are the details.
    """
    with logs_of_library() as logged:
        try:
            passed: Passed | NemoRLError = call()
        except NemoRLError as error:
            passed = error
    details = "\n".join(with_details(line.getMessage(), line) for line in logged if line.levelno < logging.WARNING)
    if isinstance(passed, NemoRLError):
        return replace(refusal(passed, advice), details=details)
    warnings = "\n".join(line.getMessage() for line in logged if line.levelno >= logging.WARNING)
    if warnings:
        return Finding(Status.WARNING, warnings, advice, details, passed.numbers)
    return ok(passed.found, details=details, numbers=passed.numbers)


def smallest(findings: Iterable[Finding], number: str) -> float | None:
    """Return the smallest value of a number that machines measured, or None if no machine measured it."""
    return min((f.numbers[number] for f in findings if number in f.numbers), default=None)
