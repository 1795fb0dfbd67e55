"""Run calls in forked processes with a deadline, so that no crash or hang of a call affects the caller.

The module is for computations on CPUs before any other part of a run has started. A child is a copy of this process, so
it has the same imported modules, and reads the parent's tensors without copying them. A child has its own process group
or its parent's. It computes on one thread, because the other threads of OpenMP do not survive a fork. It writes nothing
to the terminal, and exits when its parent exits.

Invariant: after `answers` returns or raises, no child runs, nor with `own_group` a process that a child started.
"""

import ctypes
import faulthandler
import os
import pickle
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from nemo_rl.host.boundary import Boundary
from nemo_rl.host.stop_signals import STOP_SIGNALS
from nemo_rl.utils.errors import ConfigError, DeadlineExceededError

_PR_SET_PDEATHSIG = 1
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Failure:
    """Reason why a call returned no answer."""

    what: str
    """The exception and its message, or the signal that killed the process."""
    refused: bool = False
    """Whether the call raised a `ConfigError`, whose message is then `what`."""
    raised: bool = False
    """Whether the call raised another exception, or its process exited or was killed."""


@dataclass
class _Child:
    """A forked process and the bytes that it has sent so far."""

    pid: int
    """Process id."""
    pipe: int
    """File descriptor from which to read the answer."""
    leads: bool
    """Whether the child leads its own process group."""
    received: bytearray = field(default_factory=bytearray)
    status: int | None = None

    def read(self) -> bool:
        """Read the bytes that have arrived, and return True at the end of the answer."""
        part = os.read(self.pipe, _CHUNK)
        self.received += part
        return not part

    def end(self) -> int:
        """Kill the child, and its process group if it has its own, and return the child's exit status."""
        if self.status is None:
            os.close(self.pipe)
            with suppress(ProcessLookupError, PermissionError):
                (os.killpg if self.leads else os.kill)(self.pid, signal.SIGKILL)
            self.status = os.waitpid(self.pid, 0)[1]
        return self.status


def answers[AnswerT](
    work: Callable[[int], AnswerT], number: int, timeout_s: float, *, own_group: bool = False
) -> list[AnswerT] | Failure:
    """Call `work(0)` to `work(number - 1)`, each in its own process, and return their answers.

    If one call fails, return its `Failure` and kill the other processes, which may wait for the failed one.

    Args:
        work: function whose result can be pickled.
        number: number of processes.
        timeout_s: deadline for all calls together, in seconds.
        own_group: give each process its own process group, which is killed as a whole, so that it may start children.

    Raises:
        DeadlineExceededError: not all calls have answered in time.
    """
    children: list[_Child] = []
    try:
        for index in range(number):
            children.append(_fork(lambda index=index: work(index), children, own_group))  # type: ignore[misc]
        return _collect(children, time.monotonic() + timeout_s, timeout_s)
    finally:
        for child in children:
            child.end()


def _collect(children: Sequence[_Child], end: float, timeout_s: float) -> Any:
    answered: dict[int, Any] = {}
    waiting = {child.pipe: child for child in children}
    while waiting:
        ready = select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))[0]
        if not ready:
            raise DeadlineExceededError(
                f"{len(waiting)} of {len(children)} processes gave no answer in {timeout_s:g} s."
            )
        for pipe in ready:
            child = waiting[pipe]
            if not child.read():
                continue
            del waiting[pipe]
            answer = _answer_of(child)
            if isinstance(answer, Failure):
                return answer
            answered[child.pid] = answer
    return [answered[child.pid] for child in children]


def _answer_of(child: _Child) -> Any:
    status = child.end()  # a process that has exited keeps its status
    if child.received:
        return pickle.loads(bytes(child.received))  # the data comes from a copy of this program
    if os.WIFSIGNALED(status):
        return Failure(f"its process was ended by {signal.Signals(os.WTERMSIG(status)).name}", raised=True)
    return Failure(f"its process ended with status {os.waitstatus_to_exitcode(status)}", raised=True)


def _fork(work: Callable[[], Any], others: Sequence[_Child], own_group: bool) -> _Child:
    ours, theirs = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the program may have replaced or closed the stream
            stream.flush()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's threads are idle, so the fork is safe
        pid = os.fork()
    if pid == 0:
        os.close(ours)
        for other in others:
            os.close(other.pipe)
        _run(work, theirs, parent, own_group)
    os.close(theirs)
    if own_group:
        with suppress(OSError):  # the child calls setpgid too; the first of the two calls takes effect
            os.setpgid(pid, pid)
    return _Child(pid, ours, own_group)


def _run(work: Callable[[], Any], pipe: int, parent: int, own_group: bool) -> NoReturn:
    """Run the call in the child, send its answer and exit."""
    try:
        if own_group:
            os.setpgid(0, 0)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        _end_with(parent)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nowhere, descriptor)
        faulthandler.disable()  # an abort is reported as a `Failure`, without stacks
        torch.set_num_threads(1)
        _send(pipe, _answer(work))
    finally:
        os._exit(0)


def _answer(work: Callable[[], Any]) -> Any:
    with Boundary(BaseException) as caught:  # any exception of an architecture is an answer
        return work()
    error = caught.take()
    if isinstance(error, ConfigError):
        return Failure(str(error), refused=True)
    said = str(error).strip().splitlines()
    return Failure(f"{type(error).__name__}: {said[0] if said else ''}", raised=True)


def _send(pipe: int, answer: Any) -> None:
    with os.fdopen(pipe, "wb") as file:
        pickle.dump(answer, file)


def _end_with(parent: int) -> None:
    """Make the kernel (Linux only) kill this process when its parent exits or is killed."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
