"""Grade answers in a pool of processes that can be killed, with a deadline for each answer.

The pool runs in the environment's actor. Invariant: `grade` returns one `Grade` per answer, in order. If grading an
answer raised, hung, or crashed its process repeatedly, its `Grade` has the reason as error, never a reward of 0.

    grade() ──jobs──► queue ──► thread 1 ─pipe─► grading process 1
       ▲                   └──► thread n ─pipe─► grading process n      n <= num_workers
       └──futures──────────────────┘

A thread owns its process and waits for each reply until the deadline; then it kills the process and starts another. An
answer whose process died goes back to the end of the queue, because the machine may have been short of memory. After
three deaths the answer counts as their cause and gets an error. `grade` waits on futures and adds one thread at a time
while jobs are queued. Every wait is bounded: by the answer or start deadline, or (idle threads) by `close`.
"""

import contextlib
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.environments.grading.final_answer import grade_plain_number
from nemo_rl.environments.grading.grade import PROMPT_CHARS, Grade, VerifierResult
from nemo_rl.host.processes import import_path, is_stopped
from nemo_rl.utils.errors import DeadlineExceededError, WorkerDiedError

_READ_SIZE = 65536


class GradingProcess:
    """A running `worker_main` with its pipes. Only its owner may use it, for one request at a time.

    The kernel kills the process when the thread that constructed this object ends. The thread must therefore run as
    long as the process is needed.
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
            DeadlineExceededError: The import took longer than `timeout_s`.
            WorkerDiedError: The verifier cannot be imported, or the process died.
        """
        greeting = self._read_reply(timeout_s, "starting")
        if "fatal" in greeting:
            raise WorkerDiedError(f"verifier {self.verifier!r} could not be loaded: {greeting['fatal']}")

    def ask(self, response: str, ground_truth: str, timeout_s: float, prompt: str | None = None) -> dict[str, Any]:
        """Send one answer and return the reply of `worker_main`.

        Raises:
            DeadlineExceededError: No reply came within `timeout_s`. The caller must kill this process.
            WorkerDiedError: The process died, was stopped or sent an unreadable reply. The caller must kill it.
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
        """Kill the process from another thread. A wait in `ask` then ends with WorkerDiedError."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process and everything it started, and return when it has ended. Only the owner may call this."""
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


logger = logging.getLogger(__name__)

_DEATHS_BEFORE_BLAME = 3
_BACKLOG_INTERVAL_S = 0.05
"""Time in seconds that `grade` waits for an answer before it may start another process."""


@dataclass
class _Job:
    response: str
    ground_truth: str
    prompt: str | None
    num_deaths: int = 0
    future: Future[Grade] = field(default_factory=Future)


class GradingPool:
    """A pool that grades answers in at most `num_workers` processes. Thread-safe.

    Args:
        verifier: Name or dotted path of the verifier, as in `load_verifier`.
        num_workers: Largest number of processes, which are started one by one while answers are queued.
        timeout_s: Deadline of one answer, from the moment a process takes it.
        start_timeout_s: Deadline of a process start.
        memory_limit_mb: Largest address space of one process in MB. A verifier that needs more gets a MemoryError.
    """

    def __init__(
        self,
        verifier: str,
        num_workers: int,
        timeout_s: float,
        start_timeout_s: float = 120.0,
        memory_limit_mb: int = 4096,
    ) -> None:
        self.verifier = verifier
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._memory_limit_mb = memory_limit_mb
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._processes: dict[int, GradingProcess] = {}
        self._num_starting = 0
        self._closed = False

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the running grading processes."""
        with self._lock:
            return sorted(self._processes)

    def warm_up(self) -> None:
        """Start the first grading process in the background and return immediately."""
        with self._lock:
            if not self._threads and not self._closed:
                self._add_thread()

    def grade(self, answers: Sequence[tuple[str, str]], prompts: Sequence[str] | None = None) -> list[Grade]:
        """Grade (response, ground truth) pairs, and block until each has an outcome.

        Args:
            answers: Pairs of a response and its ground truth.
            prompts: The text before each response, for verifiers that read it, or None if the prompts are not known.

        Raises:
            WorkerDiedError: The pool is closed.
        """
        if self._closed:
            raise WorkerDiedError("the grading pool is closed")
        ends = [None] * len(answers) if prompts is None else [prompt[-PROMPT_CHARS:] for prompt in prompts]
        jobs = [_Job(response, truth, end) for (response, truth), end in zip(answers, ends, strict=True)]
        for job in jobs:
            self._jobs.put(job)
        return [self._wait(job) for job in jobs]

    def grade_answers(self, answers: Sequence[tuple[str, str]], prompts: Sequence[str] | None = None) -> list[Grade]:
        """Grade plain numbers in this process, and the other answers as `grade` does."""
        here = self.verifier == "hf_math_verify"
        plain = [grade_plain_number(response, truth) if here else None for response, truth in answers]
        rest = [row for row, found in enumerate(plain) if found is None]
        ends = None if prompts is None else [prompts[row] for row in rest]
        graded = iter(self.grade([answers[row] for row in rest], ends))
        return [next(graded) if found is None else Grade(verified=found) for found in plain]

    def close(self) -> None:
        """Kill all grading processes, and fail the answers that are being graded. A second call does nothing."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
            for process in self._processes.values():
                process.interrupt()
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join(timeout=5.0)

    def _wait(self, job: _Job) -> Grade:
        while True:
            self._grow()
            try:
                return job.future.result(timeout=_BACKLOG_INTERVAL_S)
            except TimeoutError:
                if self._closed and not job.future.done():
                    return Grade(error="the grading pool was closed")

    def _grow(self) -> None:
        """Add one process if answers are queued and no process is starting."""
        with self._lock:
            wanted = not self._jobs.empty() and self._num_starting == 0
            if wanted and len(self._threads) < self.num_workers and not self._closed:
                self._add_thread()

    def _add_thread(self) -> None:
        self._num_starting += 1
        name = f"grading-{len(self._threads)}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        """Grade answers one after another on a thread of the pool, and replace the thread's process when necessary."""
        process, problem = self._start_process()
        with self._lock:
            self._num_starting -= 1
        while (job := self._jobs.get()) is not None:
            if process is None and not self._closed:
                process, problem = self._start_process()
            if process is None:
                job.future.set_result(Grade(error=problem))
                continue
            grade, healthy = self._grade_one(process, job)
            if grade is None:
                self._jobs.put(job)
            else:
                job.future.set_result(grade)
            if not healthy:
                self._end_process(process)
                process, problem = self._start_process()
        if process is not None:
            self._end_process(process)

    def _grade_one(self, process: GradingProcess, job: _Job) -> tuple[Grade | None, bool]:
        """Return the outcome, or None if the answer must be graded again, and whether the process can still be used."""
        try:
            reply = process.ask(job.response, job.ground_truth, self.timeout_s, job.prompt)
        except (DeadlineExceededError, WorkerDiedError) as error:
            if self._closed:
                return Grade(error="the grading pool was closed"), False
            logger.warning("%s (verifier %s); starting another", error, self.verifier)
            job.num_deaths += isinstance(error, WorkerDiedError)
            if isinstance(error, WorkerDiedError) and job.num_deaths < _DEATHS_BEFORE_BLAME:
                return None, False
            deaths = f"; processes that died grading this answer: {job.num_deaths}" if job.num_deaths else ""
            return Grade(error=f"{error} (verifier {self.verifier}{deaths})"), False
        return _as_grade(reply, self.verifier), True

    def _start_process(self) -> tuple[GradingProcess | None, str]:
        """Start a process and wait until it is ready, or return None and the reason if it does not start."""
        process: GradingProcess | None = None
        if self._closed:
            return None, "the grading pool was closed"
        try:
            process = GradingProcess(self.verifier, self._memory_limit_mb)
            with self._lock:
                self._processes[process.pid] = process
            process.wait_ready(self._start_timeout_s)
            return process, ""
        except (DeadlineExceededError, WorkerDiedError) as error:
            if not self._closed:
                logger.warning("A grading process did not start: %s", error)
            if process is not None:
                self._end_process(process)
            return None, str(error)

    def _end_process(self, process: GradingProcess) -> None:
        with self._lock:
            self._processes.pop(process.pid, None)
        process.kill()


def _as_grade(reply: dict[str, Any], verifier: str) -> Grade:
    """Read a reply of `worker_main`."""
    if "error" in reply:
        return Grade(error=f"verifier {verifier} raised {reply['error']}")
    return Grade(verified=VerifierResult(reply["reward"], reply["extracted_answer"]))
