"""Grade a solution with tests that the solution can neither read nor change.

    OutputTests   one sandbox for each input; what it prints is compared here
    CallTests     two sandboxes that know each other only through two pipes:
                     solution: runs the model's code, gets arguments, sends results as plain data
                     checks:   runs the tests, counts, and writes the counts into a file of its own

Invariant: no code of the solution runs in a sandbox that contains a test or a verdict.
"""

import json
import os
import struct
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from nemo_rl.data.datasets.rows.program_tests import reason_against
from nemo_rl.kits.code.blocks import without_mark
from nemo_rl.kits.code.interpreter import compiled
from nemo_rl.sandbox import End, Program, ProgramOutcome, Sandbox
from nemo_rl.utils.errors import DataError


@dataclass(frozen=True)
class CallTests:
    """Tests in Python that call the solution's functions and classes."""

    tests: tuple[str, ...]
    """Source code of tests: `assert` statements, functions `test...`, classes of `unittest`. Each assert statement is a
    check. A test without an assert statement is also a check. An exception outside of an assert is a failed check."""
    setup: str = ""
    """Source code that runs before the tests, such as imports and helper functions. A solution cannot change it."""
    names: tuple[str, ...] = ()
    """Names that both `setup` and the solution define, and for which the tests use the solution's object."""


@dataclass(frozen=True)
class OutputTests:
    """Tests of a whole program by its output for given inputs."""

    inputs: tuple[str, ...]
    """Standard input of each test."""
    outputs: tuple[str, ...]
    """Expected standard output of each test. Trailing white space of lines and of the whole output does not count."""


type Tests = CallTests | OutputTests


def tests_text(tests: Tests) -> str:
    """Return tests as the JSON text that `parse_tests` reads."""
    return json.dumps(asdict(tests))


def parse_tests(given: str | Mapping[str, Any]) -> Tests:
    """Return the tests that a JSON text or a parsed JSON object describes.

    Raises:
        DataError: `given` is neither `CallTests` nor `OutputTests`.
    """
    try:
        fields = json.loads(given) if isinstance(given, str) else dict(given)
        kind: type[CallTests] | type[OutputTests] = CallTests if "tests" in fields else OutputTests
        values: dict[str, Any] = {
            name: tuple(item) if isinstance(item, list) else item for name, item in fields.items()
        }
        tests = kind(**values)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"The tests of a sample are neither {{tests, setup, names}} nor {{inputs, outputs}} in JSON: {error}."
        ) from error
    if isinstance(tests, OutputTests) and len(tests.inputs) != len(tests.outputs):
        raise DataError(f"A sample has {len(tests.inputs)} inputs and {len(tests.outputs)} outputs.")
    if not (tests.tests if isinstance(tests, CallTests) else tests.inputs):
        raise DataError("A sample has no tests.")
    if isinstance(tests, CallTests) and (reason := _reason_against(tests)):
        raise DataError(f"The tests of a sample cannot judge a solution: {reason}.")
    return tests


@lru_cache(maxsize=1024)
def _reason_against(tests: CallTests) -> str | None:
    return reason_against(tests.tests, tests.setup, tests.names)


_COUNTS = struct.Struct("<QQQ?")
_START_ALLOWANCE_S = 30.0
_SOLUTION = ("solution", "peer", "offers", "heap", "values")
_CHECKS = ("checks", "counting", "program_tests", "peer", "offers", "heap", "values")


@dataclass(frozen=True)
class SolutionVerdict:
    """Result of the checks of a solution."""

    num_passed: int
    """Number of passed checks."""
    num_checks: int
    """Number of all checks. Checks that a solution prevented from running count as failed."""
    end: End = End.EXITED
    """Reason why the first program of the solution that did not end by itself was ended."""

    @property
    def share(self) -> float:
        """Share of the checks passed."""
        return self.num_passed / self.num_checks

    @property
    def is_right(self) -> bool:
        """True if all checks passed."""
        return self.num_passed == self.num_checks


class SolutionGrader:
    """Grade solutions. The class is thread-safe.

    Args:
        sandbox: Sandbox in which solutions run. Its limits hold for each input, or for all calls together.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        waiting_for_solution_s = sandbox.limits.wall_time_s + _START_ALLOWANCE_S
        limits = replace(sandbox.limits, wall_time_s=waiting_for_solution_s)
        self._checks_sandbox = Sandbox(limits, sandbox.mechanism)

    def grade(self, solution: str, tests: Tests) -> SolutionVerdict:
        """Grade the source code of a solution.

        Raises:
            SandboxError: The sandbox could not be set up, so the solution did not run.
        """
        solution = without_mark(solution)
        if isinstance(tests, OutputTests):
            return self._grade_outputs(solution, tests)
        return self._grade_calls(solution, tests)

    def _grade_outputs(self, solution: str, tests: OutputTests) -> SolutionVerdict:
        outcomes = [self._sandbox.run(Program(solution, stdin=text.encode())) for text in tests.inputs]
        pairs = zip(outcomes, tests.outputs, strict=True)
        num_passed = sum(one.succeeded and _lines(one.stdout) == _lines(expected) for one, expected in pairs)
        ends = [one.end for one in outcomes if one.end is not End.EXITED]
        return SolutionVerdict(num_passed, len(outcomes), ends[0] if ends else End.EXITED)

    def _grade_calls(self, solution: str, tests: CallTests) -> SolutionVerdict:
        with ExitStack() as open_descriptors:
            requests, requests_in, answers, answers_in = (
                _Descriptor(number, open_descriptors) for number in (*os.pipe(), *os.pipe())
            )
            verdict = _Descriptor(os.memfd_create("verdict"), open_descriptors)
            code = solution.encode(errors="surrogatepass")
            served = _program(_SOLUTION, {"solution_code.py": code}, requests, answers_in)
            plan = json.dumps(asdict(tests)).encode()
            checks = _program(_CHECKS, {"tests.json": plan}, answers, requests_in, verdict)
            outcome = self._run_both(served, checks, answers_in)
            counts = os.pread(verdict.number, _COUNTS.size, 0)
        return SolutionVerdict(*_counted(counts), outcome.end)

    def _run_both(self, served: Program, checks: Program, answers_in: "_Descriptor") -> ProgramOutcome:
        """Run the program of the solution and the program of the checks, and return the outcome of the solution."""
        done, failed = threading.Event(), threading.Event()
        with ThreadPoolExecutor(1, thread_name_prefix="checks") as thread:
            checking = thread.submit(self._run_checks, checks, done, failed)
            outcome = None
            try:
                outcome = self._sandbox.run(served, cancelled=done)
            finally:
                if outcome is None:
                    failed.set()
                answers_in.close()  # the checks now read the end of the pipe in place of an answer
            checking.result()
        return outcome if outcome.end is not End.CANCELLED else replace(outcome, end=End.EXITED)

    def _run_checks(self, checks: Program, done: threading.Event, failed: threading.Event) -> ProgramOutcome:
        try:
            return self._checks_sandbox.run(checks, cancelled=failed)
        finally:
            done.set()


class _Descriptor:
    """A file descriptor, which is closed only once."""

    def __init__(self, number: int, open_descriptors: ExitStack) -> None:
        self.number = number
        self._is_open = True
        open_descriptors.callback(self.close)

    def close(self) -> None:
        """Close the descriptor, unless it is closed already."""
        if self._is_open:
            self._is_open = False
            os.close(self.number)


def _program(modules: tuple[str, ...], files: dict[str, bytes], *descriptors: _Descriptor) -> Program:
    """Return a program that calls `main` of the first module."""
    numbers = tuple(one.number for one in descriptors)
    files = {**files, **{f"{name}.pyc": compiled(name) for name in modules}}
    source = f"import os, sys\nsys.path.insert(0, os.getcwd())\nimport {modules[0]}\n{modules[0]}.main{numbers}\n"
    return Program(source, arguments=tuple(map(str, numbers)), files=files, inherited=numbers)


def _counted(counts: bytes) -> tuple[int, int]:
    """Return the numbers of passed and of all checks. At least one check failed if the tests did not end properly."""
    if len(counts) < _COUNTS.size:
        return 0, 1
    passed, failed, num_known, finished = _COUNTS.unpack(counts)
    missing = 0 if finished or failed else 1
    return passed, max(passed + failed + missing, num_known, 1)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
