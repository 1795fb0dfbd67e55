"""Run untrusted programs without access to network, files and other processes, and with limited resources."""

import asyncio
import fcntl
import marshal
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

from nemo_rl.sandbox.handover import Handover
from nemo_rl.sandbox.mechanisms import IN_ORDER, SCRATCH, Choice, Mechanism
from nemo_rl.sandbox.plan import MAX_FILES, make_plan, max_threads
from nemo_rl.sandbox.program import End, Limits, Program, ProgramOutcome, language_of, python
from nemo_rl.sandbox.scratch import is_beyond, remove
from nemo_rl.sandbox.supervision import Launch, Supervision
from nemo_rl.utils.errors import SandboxError

_JAIL = str(Path(__file__).parent / "jail")
_ALL_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_PROBE_LIMITS = Limits(wall_time_s=30, cpu_time_s=30)
_PROBE_ADDRESS = ("127.0.0.1", 65009)
"""Address that the probe gives to a program, which does not connect to it."""


class Sandbox:
    """Run programs, each of them isolated. The class is thread-safe.

    A program sees a scratch folder, which contains only the program's files and is its current folder, and the
    read-only files of its language. It sees nothing else: no network, no environment variables, no `/proc` and no other
    process, except for the paths, variables and the one server that `Program` names. When `run` returns, the program's
    processes and its scratch folder no longer exist.

    Args:
        limits: Limits of each run.
        mechanism: "bubblewrap", "landlock", or "auto" for the first mechanism that works on this machine. A `Mechanism`
            is used without testing whether it works.
        num_workers: Number of runs of `run_async` at the same time. Further runs wait.

    Raises:
        SandboxError: The mechanism does not work on this machine. Nothing ever runs unprotected.
    """

    def __init__(
        self, limits: Limits | None = None, mechanism: Choice | Mechanism = "auto", num_workers: int = 8
    ) -> None:
        self.limits = limits or Limits()
        self.mechanism = mechanism if isinstance(mechanism, Mechanism) else choose_mechanism(mechanism)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="sandbox")

    def run(self, program: Program, cancelled: threading.Event | None = None) -> ProgramOutcome:
        """Run a program and wait for its end.

        Args:
            program: Program to run.
            cancelled: Event that another thread sets to end the run early.

        Raises:
            SandboxError: The program could not be isolated, so it did not run.
            ValueError: The language is unknown, or a file is outside of the scratch folder.
        """
        return _run(self.mechanism, self.limits, program, cancelled or threading.Event())

    async def run_async(self, program: Program) -> ProgramOutcome:
        """Run a program without blocking the event loop, and end it if the call is cancelled.

        Raises:
            SandboxError: The program could not be isolated, so it did not run.
            ValueError: The language is unknown, or a file is outside of the scratch folder.
        """
        cancelled = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self.run, program, cancelled)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def close(self) -> None:
        """Cancel the runs of `run_async` that have not started, wait for the other runs, and release the threads."""
        self._threads.shutdown(cancel_futures=True)


def choose_mechanism(choice: Choice) -> Mechanism:
    """Return the first mechanism of a choice that works on this machine.

    Raises:
        SandboxError: None of them works. The message has the reason for each mechanism.
    """
    wanted = [one for one in IN_ORDER if choice in ("auto", one.name)]
    if not wanted:
        allowed = ", ".join(dict.fromkeys(one.name for one in IN_ORDER))
        raise SandboxError(f"The sandbox {choice!r} is unknown; choose auto, {allowed}.")
    reasons = []
    for mechanism in wanted:
        reason = why_unavailable(mechanism)
        if reason is None:
            return mechanism
        reasons.append(f"{mechanism.name} (namespaces: {mechanism.namespaces}): {reason}")
    raise SandboxError(
        "No sandbox works on this machine, and programs never run without one. Install bubblewrap and allow user "
        "namespaces, or use a kernel with Landlock (Linux 6.2 or later; 5.13 where namespaces are allowed).\n  "
        + "\n  ".join(reasons)
    )


@cache
def why_unavailable(mechanism: Mechanism, with_address: bool = False) -> str | None:
    """Return why a mechanism does not work on this machine, or None if a program ran in it just now.

    Args:
        mechanism: Mechanism to try.
        with_address: Whether the mechanism must also work for programs with an address, which needs more rights.
    """
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if mechanism.namespaces == "outer" and not shutil.which("bwrap"):
        return "bwrap is not installed (package bubblewrap)"
    try:
        probe = Program("print(6 * 7)", address=_PROBE_ADDRESS if with_address else None)
        outcome = _run(mechanism, _PROBE_LIMITS, probe, threading.Event())
    except SandboxError as error:
        return str(error)
    return None if outcome.stdout == "42\n" else f"a small program did not run: {outcome}"


def _run(mechanism: Mechanism, limits: Limits, program: Program, cancelled: threading.Event) -> ProgramOutcome:
    if program.address is not None and not mechanism.has_own_files:
        raise SandboxError(
            "A program that may connect to a server needs namespaces, which this machine does not allow."
        )
    if program.address is None and not program.returned:
        return _supervised(mechanism, limits, program, cancelled, None)
    with Handover(program.address) as handover:
        return _supervised(mechanism, limits, program, cancelled, handover)


def _supervised(
    mechanism: Mechanism, limits: Limits, program: Program, cancelled: threading.Event, handover: Handover | None
) -> ProgramOutcome:
    language = language_of(program.language)
    channel = () if handover is None else (handover.inside,)
    with _scratch_of(mechanism) as folder, _sealed(program.stdin) as stdin:
        plan = make_plan(mechanism, limits, program, language, folder, *channel)
        with _sealed(marshal.dumps(plan)) as plan_file:
            command = [python().command[0], "-I", "-S", _JAIL, str(plan_file)]
            readable = [*plan["readable"], *python().readable, _JAIL]
            launch = Launch(
                lambda control, info: mechanism.wrap([*command, str(control)], readable, info),
                stdin,
                (plan_file, *channel, *program.inherited),
                mechanism.namespaces == "outer",
                max_threads(mechanism, limits),
            )

            def is_full() -> bool:
                return not mechanism.has_own_files and is_beyond(folder, limits.scratch_mb << 20, MAX_FILES)

            outcome = Supervision(launch, limits, is_full, cancelled).run()
        if handover is None or outcome.end is End.CANCELLED:
            return outcome
        return replace(outcome, files=handover.files(program.returned, program.returned_bytes))


@contextmanager
def _scratch_of(mechanism: Mechanism) -> Iterator[str]:
    """Yield the path of the scratch folder. Make and remove the folder if programs share the machine's files."""
    if mechanism.has_own_files:
        yield SCRATCH
        return
    folder = os.path.realpath(tempfile.mkdtemp(prefix="nemo_rl_sandbox_"))
    try:
        yield folder
    finally:
        remove(folder)


@contextmanager
def _sealed(content: bytes) -> Iterator[int]:
    """Yield a descriptor of a file in memory, which can no longer be changed, positioned at its beginning."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _ALL_SEALS)
        yield descriptor
    finally:
        os.close(descriptor)
