"""Start an isolated process, read its output, and end the process and everything that it started.

    this thread ── selects on ── standard output and error: kept up to a limit
                              ├─ control: `init PID`, `ready`, `error TEXT` of the code inside; bubblewrap's report
                              └─ the end of the process
                  and looks every 50 ms: deadlines, cancellation, resident memory and processor time

Invariant: when `Supervision.run` returns or raises, no process of the run exists.
"""

import contextlib
import json
import logging
import os
import select
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from nemo_rl.sandbox.program import End, Limits, ProgramOutcome
from nemo_rl.utils.errors import SandboxError

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_COUNTED = ("RssAnon:", "RssShmem:")
_PIPE_BYTES = 65536
_OF_A_QUEUE = 2
"""Bytes of kernel memory for each byte in the queue of a TCP socket, whose buffers grow when needed."""


@dataclass(frozen=True)
class Usage:
    """Resources that several processes use together."""

    cpu_time_s: float
    """Processor time in seconds of the running processes, and of their children that have ended."""
    memory_bytes: int
    """Resident memory of the processes: anonymous and shared pages, without pages of files, and the kernel memory that
    their pipes and sockets may hold. A page that several processes share counts once for each."""
    threads: int
    """Number of threads of all processes. Each process has at least one."""


def usage_of(pid: int, max_threads: int) -> Usage:
    """Return the usage of a process and all its descendants, with zeros if the process has ended.

    Args:
        pid: The process.
        max_threads: Counting stops above this number, because a fork bomb starts threads faster than they are counted.
    """
    cpu_time_s, memory_bytes, threads, to_visit = 0.0, 0, 0, [pid]
    buffers: dict[str, int] = {}
    while to_visit and threads <= max_threads:
        place = Path(f"/proc/{to_visit.pop()}")
        try:
            cpu_time_s += _cpu_time_s(place)
            memory_bytes += _memory_bytes(place)
            buffers |= _buffers(place)
            for thread in (place / "task").iterdir():
                threads += 1
                to_visit += [int(child) for child in (thread / "children").read_text(encoding="ascii").split()]
        except (FileNotFoundError, ProcessLookupError):  # the process has ended meanwhile
            continue
    return Usage(cpu_time_s, memory_bytes + sum(buffers.values()), threads)


def _cpu_time_s(place: Path) -> float:
    fields = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields[11:15]) / _TICKS_PER_S  # user and system, with ended children


def _memory_bytes(place: Path) -> int:
    lines = (place / "status").read_text(errors="replace").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(_COUNTED))


def _buffers(place: Path) -> dict[str, int]:
    """Return the maximum number of bytes that each pipe and socket of a process may buffer, by name.

    The result is empty if the supervisor may not read the process's file descriptors, for example as root without
    CAP_SYS_PTRACE.
    """
    found: dict[str, int] = {}
    try:
        for entry in os.scandir(place / "fd"):
            name = os.readlink(entry.path)
            if name.startswith(("pipe:", "socket:")):
                found[name] = _PIPE_BYTES if name.startswith("pipe:") else _socket_bytes()
    except (PermissionError, FileNotFoundError):  # the file was closed meanwhile, or belongs to another user
        return found
    if any(name.startswith("socket:") for name in found):
        for name, num_bytes in _tcp_queues(place).items():
            if name in found:
                found[name] = max(found[name], num_bytes)
    return found


def _tcp_queues(place: Path) -> dict[str, int]:
    """Return the bytes of kernel memory for the queues of TCP sockets, by the name of the socket."""
    queues = {}
    for table in ("tcp", "tcp6"):
        for line in (place / "net" / table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            held = sum(int(size, 16) for size in fields[4].split(":"))
            queues[f"socket:[{fields[9]}]"] = _OF_A_QUEUE * held
    return queues


@cache
def _socket_bytes() -> int:
    """Return the default size of a socket's buffer."""
    try:
        return int(Path("/proc/sys/net/core/wmem_default").read_text(encoding="ascii"))
    except (OSError, ValueError):  # a container may hide this file
        return 212_992


logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.05
_START_DEADLINE_S = 60.0
_END_DEADLINE_S = 20.0
_CHUNK_BYTES = 65536
_KILLED = 128 + signal.SIGKILL
_OUT_OF_CPU_TIME = 128 + signal.SIGXCPU


@dataclass
class _Stream:
    """The bytes that were read from one pipe, up to a limit."""

    limit: int
    kept: bytearray = field(default_factory=bytearray)
    overflowed: bool = False

    def add(self, data: bytes) -> None:
        room = self.limit - len(self.kept)
        self.kept += data[:room]
        self.overflowed |= len(data) > room

    def text(self) -> str:
        return self.kept.decode(errors="replace")


@dataclass(frozen=True)
class Launch:
    """Command and descriptors of an isolated process."""

    command: Callable[[int, int], Sequence[str]]
    """Function that returns the command line, given the numbers of the two control descriptors."""
    stdin: int
    """File descriptor of the process's standard input."""
    inherited: Sequence[int]
    """Further file descriptors that the process inherits."""
    has_report: bool
    """Whether the process gets the second control descriptor, on which bubblewrap reports. Without bubblewrap, the
    program would inherit it and could report any process there."""
    max_threads: int
    """Largest number of processes and threads, counted from the first watched process. Above it the run is ended."""


class Supervision:
    """One run, from its start to the death of its last process.

    Args:
        launch: Command and descriptors of the first process.
        is_scratch_full: Returns whether the scratch folder is beyond its limit, if the kernel does not limit it.
        cancelled: Event that another thread sets to end the run.

    Raises:
        SandboxError: The process could not be started.
    """

    def __init__(
        self, launch: Launch, limits: Limits, is_scratch_full: Callable[[], bool], cancelled: threading.Event
    ) -> None:
        self._limits, self._max_threads = limits, launch.max_threads
        self._is_scratch_full = is_scratch_full
        self._cancelled = cancelled
        self._out, self._err = _Stream(limits.output_bytes), _Stream(limits.output_bytes)
        self._control, self._info = _Stream(_CHUNK_BYTES), _Stream(_CHUNK_BYTES)
        self._process, self._pidfd, self._pipes = self._start(launch)
        self._started = time.monotonic()
        self._ready_at: float | None = None
        self._cpu_time_s = 0.0
        self._init: tuple[int, int] | None = None

    def run(self) -> ProgramOutcome:
        """Wait for the end of the run and return its outcome.

        Raises:
            SandboxError: The program could not be isolated, and did not run.
        """
        try:
            end = self._watch()
        except OSError as error:  # for example, too many open files
            raise SandboxError(f"A program in a sandbox could not be watched and was ended: {error}") from error
        finally:
            status, cpu_time_s = self._end_all()
        if self._ready_at is None and end is not End.CANCELLED:
            raise SandboxError(f"The sandbox could not lock the program up, so it did not run: {self._complaint()}")
        if end is End.EXITED:
            used_up = status == _KILLED and cpu_time_s >= self._limits.cpu_time_s
            end = End.CPU_TIME if used_up or status == _OUT_OF_CPU_TIME else self._overflow() or End.EXITED
        wall_time_s = time.monotonic() - (self._ready_at or self._started)
        return ProgramOutcome(end, status, self._out.text(), self._err.text(), wall_time_s, cpu_time_s)

    def _start(self, launch: Launch) -> tuple[subprocess.Popen[bytes], int, dict[int, _Stream]]:
        """Start the process, and return the process, its pidfd, and its streams by the reading ends of their pipes."""
        with contextlib.ExitStack() as given, contextlib.ExitStack() as kept:
            try:
                (out, out_inside), (err, err_inside) = _pipe(kept, given), _pipe(kept, given)
                (control, control_inside), (info, info_inside) = _pipe(kept, given), _pipe(kept, given)
                process = subprocess.Popen(
                    launch.command(control_inside, info_inside),
                    stdin=launch.stdin,
                    stdout=out_inside,
                    stderr=err_inside,
                    env={},
                    cwd="/",
                    pass_fds=(control_inside, *([info_inside] if launch.has_report else []), *launch.inherited),
                    start_new_session=True,
                )
                pidfd = _opened(process)
            except OSError as error:
                raise SandboxError(f"The sandbox did not start: {error}") from error
            kept.pop_all()
        return process, pidfd, {out: self._out, err: self._err, control: self._control, info: self._info}

    def _watch(self) -> End:
        """Read the pipes until the process ends or exceeds a limit, and return the reason for the end."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._pidfd, selectors.EVENT_READ)
            for pipe, stream in self._pipes.items():
                selector.register(pipe, selectors.EVENT_READ, stream)
            look_at = time.monotonic() + _LOOK_EVERY_S
            while True:
                for key, _ in selector.select(_LOOK_EVERY_S):
                    if key.data is None:
                        return End.EXITED
                    data = os.read(key.fd, _CHUNK_BYTES)
                    key.data.add(data)
                    if not data:
                        selector.unregister(key.fd)
                self._read_control()
                if time.monotonic() >= look_at or self._overflow():
                    look_at = time.monotonic() + _LOOK_EVERY_S
                    if end := self._limit_reached():
                        return end

    def _read_control(self) -> None:
        """Read the reports about the start of the program and the first process of its namespace.

        Reports about the first process after the program's start may come from the program and are ignored.
        """
        if self._ready_at is not None:
            return
        is_ready = b"ready\n" in self._control.kept
        if is_ready:
            self._read_left()
        if self._init is None and (pid := self._init_pid()):
            with contextlib.suppress(ProcessLookupError):
                self._init = pid, os.pidfd_open(pid)
        if is_ready:
            self._ready_at = time.monotonic()

    def _init_pid(self) -> int | None:
        """Return the id of the first process of the namespace, as the code inside or bubblewrap reported it."""
        for line in self._control.kept.splitlines():
            if line.startswith(b"init "):
                return int(line.split()[1])
        try:
            report = json.loads(self._info.kept)
        except ValueError:  # not reported yet
            return None
        pid = report.get("child-pid") if isinstance(report, dict) else None
        return pid if isinstance(pid, int) and pid > 0 else None

    def _limit_reached(self) -> End | None:
        if self._cancelled.is_set():
            return End.CANCELLED
        now, limits = time.monotonic(), self._limits
        if self._ready_at is None:
            return End.WALL_TIME if now - self._started > _START_DEADLINE_S else None
        if now - self._ready_at > limits.wall_time_s:
            return End.WALL_TIME
        if end := self._overflow():
            return end
        used = usage_of(self._init[0] if self._init else self._process.pid, self._max_threads)
        self._cpu_time_s = max(self._cpu_time_s, used.cpu_time_s)
        if used.cpu_time_s > limits.cpu_time_s:
            return End.CPU_TIME
        if used.threads > self._max_threads:
            return End.PROCESSES
        if used.memory_bytes > limits.memory_mb << 20:
            return End.MEMORY
        return End.SCRATCH if self._is_scratch_full() else None

    def _overflow(self) -> End | None:
        return End.OUTPUT if self._out.overflowed or self._err.overflowed else None

    def _end_all(self) -> tuple[int, float]:
        """Kill and await all remaining processes, read the rest of the pipes, and return exit code and CPU seconds."""
        try:
            self._read_left()
            with contextlib.suppress(OSError):  # without a pidfd, the first process ends with its parent
                self._read_control()
            first = self._init[1] if self._init else self._pidfd
            _kill(first)
            self._wait_for(first)  # the kernel ends a namespace before its first process has ended
            self._wait_for(self._pidfd)
            _, status, used = os.wait4(self._process.pid, 0)
            code = self._process.returncode = os.waitstatus_to_exitcode(status)
            self._read_left()
        finally:
            for descriptor in (*self._pipes, self._pidfd, *([self._init[1]] if self._init else [])):
                os.close(descriptor)
        return code if code >= 0 else 128 - code, max(self._cpu_time_s, used.ru_utime + used.ru_stime)

    def _wait_for(self, pidfd: int) -> None:
        poll = select.poll()  # `select` does not accept descriptors from 1024 on
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(_END_DEADLINE_S * 1000):
            _kill(self._pidfd)
            raise SandboxError(f"A program in a sandbox did not end within {_END_DEADLINE_S:g} s of SIGKILL.")

    def _read_left(self) -> None:
        """Read the bytes that are now in the pipes, without waiting for more."""
        for pipe, stream in self._pipes.items():
            os.set_blocking(pipe, False)
            with contextlib.suppress(BlockingIOError):
                while not stream.overflowed and (data := os.read(pipe, _CHUNK_BYTES)):
                    stream.add(data)

    def _complaint(self) -> str:
        reported = [line[6:] for line in self._control.text().splitlines() if line.startswith("error ")]
        return "; ".join(reported) or self._err.text().strip() or "it gave no reason."


def _pipe(kept: contextlib.ExitStack, given: contextlib.ExitStack) -> tuple[int, int]:
    """Make a pipe whose reading end is kept here and whose writing end is given to the process."""
    ours, theirs = os.pipe()
    kept.callback(os.close, ours)
    given.callback(os.close, theirs)
    return ours, theirs


def _opened(process: subprocess.Popen[bytes]) -> int:
    """Return a pidfd of the process. If there can be none, end the process, because nothing could watch it."""
    try:
        return os.pidfd_open(process.pid)
    except OSError:
        process.kill()
        process.wait()
        raise


def _kill(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
