"""Run checks in a separate process, each with a deadline, so that one failure does not end the other checks.

    this process ── check ──► worker: torch, CUDA, the library ──► findings, one message each
                  └─ no answer in time, or the worker is gone: end its process group, failed row, new worker for the
                  next check

A worker runs further checks until one raises: imports and a CUDA context take seconds, but an exception may leave a
process group or a broken context. Invariant: this process does not import torch.
"""

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from gpu_checks.report import Finding, Kind, Row, Status

START_DEADLINE_S = 120.0
"""Seconds for importing torch and transformers from a cold disk and for the first use of a GPU."""
_LEAST_S = 5.0
"""No check is started with fewer seconds left."""


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: unique name.
        kind: kind of its rows.
        target: `module:function`; the function takes the worker's bench and yields `Finding`s.
        deadline_s: limit for each of its findings.
        environment: variables that its process needs before CUDA starts; it then has a process of its own.
    """

    name: str
    kind: Kind
    target: str
    deadline_s: float
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Setting:
    """Settings of a worker.

    Attributes:
        cpu: use tiny shapes on the CPU instead of a GPU.
        folder: folder for models and checkpoints; the caller removes it.
        plant_fault: change one weight of the models that the policy loads, to test the checks themselves.
        bench: `module:class` of the object that checks get; constructed with this setting.
    """

    cpu: bool
    folder: str
    plant_fault: bool = False
    bench: str = "gpu_checks.bench:Bench"


class Runner:
    """Runs checks until a time budget is used up.

    Args:
        setting: settings of the workers.
        budget_s: limit for all checks.
    """

    def __init__(self, setting: Setting, budget_s: float):
        self.machine: dict[str, Any] = {}
        self._setting = setting
        self._end = time.monotonic() + budget_s
        self._budget_s = budget_s
        self._worker: _Worker | None = None
        self._cannot_start = False

    def rows(self, checks: Sequence[Check]) -> Iterator[Row]:
        """Run the checks in order."""
        for check in checks:
            before = time.monotonic()
            for row in self._rows_of(check):
                now = time.monotonic()
                yield replace(row, seconds=round(now - before, 2))
                before = now

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _rows_of(self, check: Check) -> Iterator[Row]:
        if self._left() < _LEAST_S:
            yield self._out_of_budget(check)
            return
        if self._cannot_start:
            yield Row(check.name, "not run", check.kind, "skipped", reason="no process for checks can be started")
            return
        if self._worker is not None and self._worker.environment != check.environment:
            self.close()
        if self._worker is None:
            self._worker = _Worker(self._setting, check.environment)
            started = self._worker.answer(min(START_DEADLINE_S, self._left()))
            if not isinstance(started, dict):
                self._cannot_start = not self.machine  # a GPU that has worked may recover
                yield self._ended(check, started, START_DEADLINE_S)
                return
            self.machine = started
        self._worker.ask(check)
        while True:
            answer = self._worker.answer(min(check.deadline_s, self._left()))
            if answer == _DONE:
                return
            if not isinstance(answer, Finding):
                yield self._ended(check, answer, check.deadline_s)
                return
            status: Status = "failed" if answer.problem else "ok"
            yield Row(check.name, answer.name, check.kind, status, answer.figures, answer.problem)

    def _ended(self, check: Check, answer: "_Raised | None", deadline_s: float) -> Row:
        """Return the row of a check that raised, hung or lost its process; end the worker."""
        assert self._worker is not None
        status = self._worker.kill()
        self._worker = None
        if answer is not None:
            return Row(check.name, "raised", check.kind, "failed", reason=answer.reason, trace=answer.trace)
        if status is not None:
            return Row(check.name, "ended", check.kind, "failed", reason=f"its process ended with status {status}")
        if self._left() <= 0:
            return self._out_of_budget(check)
        return Row(check.name, "hung", check.kind, "failed", reason=f"no answer within {deadline_s:g} s")

    def _out_of_budget(self, check: Check) -> Row:
        reason = f"the budget of {self._budget_s:g} s is spent"
        return Row(check.name, "not run", check.kind, "skipped", reason=reason)


@dataclass(frozen=True)
class _Raised:
    """An exception of a check: its last line, and its traceback."""

    reason: str
    trace: str


_DONE = "done"


class _Worker:
    """Process that runs checks; it leads a process group that is ended as a whole."""

    def __init__(self, setting: Setting, environment: tuple[tuple[str, str], ...] = ()):
        self.environment = environment
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._pipe, theirs = context.Pipe()
        # Not a daemon: daemons may not have a child, which the weight sync needs.
        self._process = context.Process(target=_serve, args=(theirs, setting, environment))
        self._process.start()
        theirs.close()

    def ask(self, check: Check) -> None:
        """Start a check; `answer` returns its findings."""
        with suppress(OSError):  # the worker is gone: `answer` reports it
            self._pipe.send(check)

    def answer(self, timeout_s: float) -> Any:
        """Return the next message; None if none came in time or the worker is gone."""
        try:
            return self._pipe.recv() if self._pipe.poll(max(0.0, timeout_s)) else None
        except (EOFError, OSError):
            self._process.join(5)
            return None

    def kill(self) -> int | None:
        """End the process group; return the worker's exit status if it had already ended."""
        status = self._process.exitcode
        assert self._process.pid is not None, "it was started"
        with suppress(ProcessLookupError):  # it may not lead a group yet
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._pipe.close()
        return status


def _serve(pipe: Connection, setting: Setting, environment: tuple[tuple[str, str], ...]) -> None:
    """Run a worker: send the machine's facts, then run checks until the pipe closes."""
    os.setsid()
    faulthandler.enable()
    os.environ |= {"HF_HUB_OFFLINE": "1", "KINETO_LOG_LEVEL": "99"} | dict(environment)
    try:
        bench = _named(setting.bench)(setting)
        pipe.send(bench.machine())
    except BaseException as error:
        pipe.send(_raised(error))
        return
    with suppress(EOFError):
        while True:
            _run(pipe, bench, pipe.recv())


def _run(pipe: Connection, bench: Any, check: Check) -> None:
    """Run one check; send its findings and how it ended."""
    # Before a check is ended for hanging, show on stderr where it hangs.
    faulthandler.dump_traceback_later(0.9 * check.deadline_s, exit=False, file=sys.stderr)
    try:
        for finding in _named(check.target)(bench):
            pipe.send(finding)
            faulthandler.dump_traceback_later(0.9 * check.deadline_s, exit=False, file=sys.stderr)
        pipe.send(_DONE)
    except Exception as error:
        pipe.send(_raised(error))
    finally:
        faulthandler.cancel_dump_traceback_later()


def _named(target: str) -> Any:
    """Import the object `module:name`."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _raised(error: BaseException) -> _Raised:
    last = traceback.format_exception_only(error)[-1].strip()
    return _Raised(last.splitlines()[0][:300], traceback.format_exc())
