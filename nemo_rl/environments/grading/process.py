"""Start one grading process, send it answers with a deadline, and kill it.

`pool` owns several of these; `worker_main` runs in the process. Invariant: every wait has a deadline, and a process
that missed one is killed with all its children.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

from nemo_rl.host.processes import import_path, is_stopped
from nemo_rl.utils.errors import DeadlineExceededError, WorkerDiedError

_READ_SIZE = 65536


class GradingProcess:
    """A running `worker_main` with its pipes. Not thread-safe: one owner, one request at a time.

    The kernel kills the process when the thread that constructed this object ends, so that thread
    must run as long as the process is needed.
    """

    def __init__(self, verifier: str, memory_limit_mb: int) -> None:
        self.verifier = verifier
        self._buffer = b""
        command = [sys.executable, "-P", "-m", "nemo_rl.environments.grading.worker_main"]
        python_path, folders = import_path()
        arguments = [verifier, str(os.getpid()), str(memory_limit_mb), *folders]
        try:
            self._process = subprocess.Popen(
                command + arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerDiedError(f"a grading process could not start: {error}") from error

    @property
    def pid(self) -> int:
        """Process id on this node."""
        return self._process.pid

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the verifier is imported.

        Raises:
            DeadlineExceededError: It took longer than `timeout_s`.
            WorkerDiedError: The verifier cannot be imported, or the process died.
        """
        greeting = self._read_reply(timeout_s, "starting")
        if "fatal" in greeting:
            raise WorkerDiedError(f"verifier {self.verifier!r} could not be loaded: {greeting['fatal']}")

    def ask(self, response: str, ground_truth: str, timeout_s: float, prompt: str | None = None) -> dict[str, Any]:
        """Send one answer and return the reply of `worker_main`.

        Raises:
            DeadlineExceededError: No reply within `timeout_s`; kill this process.
            WorkerDiedError: The process died, was stopped or wrote an unreadable reply; kill this process.
        """
        request = json.dumps({"response": response, "ground_truth": ground_truth, "prompt": prompt}) + "\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request.encode())
            self._process.stdin.flush()
        except OSError as error:
            raise self._death("taking an answer") from error
        return self._read_reply(timeout_s, "grading")

    def interrupt(self) -> None:
        """Kill the process from another thread: a wait in `ask` ends with WorkerDiedError."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process and everything it started; return when it has ended. Only the owner may call this."""
        self.interrupt()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def _read_reply(self, timeout_s: float, activity: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
        while b"\n" not in self._buffer:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not poll.poll(remaining_s * 1000):
                if is_stopped(self.pid):
                    raise WorkerDiedError(f"the grading process (pid {self.pid}) is stopped (SIGSTOP) {activity}")
                raise DeadlineExceededError(f"{activity} took longer than {timeout_s:g} s")
            chunk = os.read(descriptor, _READ_SIZE)
            if not chunk:
                raise self._death(activity)
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        try:
            return json.loads(line)
        except ValueError as error:
            raise WorkerDiedError(f"the grading process wrote {line[:80]!r}") from error

    def _death(self, activity: str) -> WorkerDiedError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        status = self._process.returncode
        cause = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
        return WorkerDiedError(f"the grading process (pid {self.pid}) died ({cause}) {activity}")
