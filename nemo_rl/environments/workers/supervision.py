"""Keep the actor of an environment running: start it, replace it after a hang or a death, and give up in the end.

For each call, `client` asks for the running actor and reports an answer, a hang or a death. Invariant: at most one
actor runs at a time. After too many deaths in a row, or a start that failed, every later request raises the same error.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from nemo_rl.distributed.workers.logs import end_with_descendants, stopped_among, tail_of_logs
from nemo_rl.distributed.workers.process import LoggedProcess
from nemo_rl.distributed.workers.results import WORKER_DEATHS, full_memory
from nemo_rl.environments.user_errors import user_lines
from nemo_rl.environments.workers.process_guard import MEMORY_MARK
from nemo_rl.utils.errors import WorkerDiedError

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Incarnation:
    """One actor process of the environment."""

    handle: ActorHandle
    ready: "ray.ObjectRef[LoggedProcess]"
    """The actor's process, available after the environment is constructed."""
    ended_by_us: bool = False
    """Whether the library killed the process because it missed a deadline."""
    was_stopped: bool = False
    """Whether SIGSTOP had stopped the process when it missed the deadline."""
    process: LoggedProcess | None = None
    """The actor's process, or None until it is known."""


class SupervisedActor:
    """The actor of one environment, which the constructor starts in the background.

    Args:
        name: For logs and errors.
        start: Function that starts an actor and returns before the actor is ready.
        max_restarts: Largest number of times that the actor may be replaced without an answer in between.
        kind: What the actor hosts, for logs and errors.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], ActorHandle],
        *,
        start_timeout_s: float,
        max_restarts: int,
        kind: str = "environment",
    ) -> None:
        self.num_restarts = 0
        """Number of times that the actor was replaced."""
        self.failure: WorkerDiedError | None = None
        """Error that every further call raises, or None as long as calls are possible."""
        self.last_excess: str | None = None
        """Memory used by the last actor that ended because it used too much, or None if there was none."""
        self._name = f"{kind} {name!r}"
        self._start = start
        self._start_timeout_s = start_timeout_s
        self._max_restarts = max_restarts
        self._restarts_in_a_row = 0
        self.incarnation: Incarnation | None = self._launch()
        """Running actor, or None if the next call starts one."""

    def running(self) -> Incarnation:
        """Return the running actor, or start one if there is none.

        Raises:
            WorkerDiedError: The environment cannot be kept running, or was shut down.
        """
        if self.failure is not None:
            raise self.failure
        if self.incarnation is None:
            self.incarnation = self._launch()
        return self.incarnation

    async def until_ready(self, incarnation: Incarnation) -> None:
        """Wait until the environment is constructed.

        Raises:
            WorkerDiedError: The environment's constructor raised, or took longer than `start_timeout_s`.
            RayActorError, OutOfMemoryError: The process died while it started.
        """
        if incarnation.process is not None:
            return
        try:
            incarnation.process = await answer_of(incarnation.ready, self._start_timeout_s)
        except TimeoutError as error:
            reason = f"did not start in {self._start_timeout_s:g} s"
            raise self._fail(reason) from error
        except WORKER_DEATHS as error:
            if getattr(error, "actor_init_failed", False):
                raise self._fail(f"could not be constructed: {construction_error(error)}") from error
            raise

    def note_answer(self) -> None:
        """Note that the actor answered. The number of restarts in a row becomes 0."""
        self._restarts_in_a_row = 0

    def note_blamed(self) -> None:
        """Note that a sample, which is not sent again, caused the last death, so that this death is not counted."""
        self._restarts_in_a_row = max(self._restarts_in_a_row - 1, 0)

    async def cause_of_death(self, incarnation: Incarnation, error: RayError) -> str:
        """Return why an actor died, from its own message about memory or from Ray's report."""
        if incarnation.process is not None:
            tail = await asyncio.to_thread(tail_of_logs, incarnation.process)
            excess = [line.partition(MEMORY_MARK)[2] for line in tail.splitlines() if MEMORY_MARK in line]
            if excess:
                self.last_excess = excess[-1]
                return f"used {self.last_excess}"
        return death_in_short(error)

    def end_hung(self, incarnation: Incarnation, reason: str) -> None:
        """Kill an actor that missed a deadline, unless it was killed before. Its other calls are repeated."""
        if incarnation.ended_by_us:
            return
        incarnation.ended_by_us = True
        processes = [incarnation.process] if incarnation.process else []
        incarnation.was_stopped = bool(stopped_among(processes))
        end_with_descendants(processes)  # before Ray's request, which a stopped process does not read
        self.replace(incarnation, reason)

    def replace(self, incarnation: Incarnation, reason: str) -> None:
        """Kill an actor, unless it was replaced before, and count this restart against the limit."""
        if self.incarnation is not incarnation:
            return
        ray.kill(incarnation.handle)
        self.incarnation = None
        self.num_restarts += 1
        self._restarts_in_a_row += 1
        if self._restarts_in_a_row > self._max_restarts:
            self._fail(
                f"died once more after {self._max_restarts} restarts without an answer in between "
                f"(cluster.max_actor_restarts); last: {reason}"
            )
            return
        logger.warning(
            "The actor of %s ended (%s); starting it again (%d of at most %d in a row)",
            self._name,
            reason,
            self._restarts_in_a_row,
            self._max_restarts,
        )

    def shutdown(self, timeout_s: float) -> None:
        """Stop the actor and everything it started, so that later calls raise. A second call does nothing.

        Args:
            timeout_s: Time limit in seconds for the environment's own `shutdown`, after which the actor is killed.
        """
        incarnation, self.incarnation = self.incarnation, None
        self.failure = WorkerDiedError(f"{self._name} was shut down")
        if incarnation is None:
            return
        try:
            ray.get(incarnation.handle.shutdown.remote(), timeout=timeout_s)
        except (GetTimeoutError, *WORKER_DEATHS, RayTaskError) as error:
            if not getattr(error, "actor_init_failed", False):  # its constructor was reported
                logger.warning("The actor of %s did not shut down by itself: %s", self._name, death_in_short(error))
        ray.kill(incarnation.handle)

    def _launch(self) -> Incarnation:
        handle = self._start()
        return Incarnation(handle, handle.ready.remote())

    def _fail(self, reason: str) -> WorkerDiedError:
        """Stop the actor permanently, and return the error that later calls raise."""
        if self.failure is None:
            self.failure = WorkerDiedError(f"{self._name} {reason}")
        if self.incarnation is not None:
            ray.kill(self.incarnation.handle)
            self.incarnation = None
        return self.failure


async def answer_of(call: "ray.ObjectRef[Any]", timeout_s: float) -> Any:
    """Await a Ray call with a deadline. Raise TimeoutError after the deadline, or the error of the call."""
    return await asyncio.wait_for(asyncio.wrap_future(call.future()), timeout_s)


def construction_error(error: RayError) -> str:
    """Return the error of a constructor: the last line of Ray's report, and the last lines of the user's code."""
    last = [line.strip() for line in str(error).splitlines() if line.strip()][-1]
    lines = "\n".join(map(str, user_lines(error)[-3:]))
    return f"{last}\n{lines}" if lines else last


def death_in_short(error: RayError) -> str:
    """Return why the machine ran out of memory, or the lines of Ray's report that name the process that died."""
    full = full_memory(error)
    if full:
        return full
    lines = [line.strip() for line in str(error).splitlines()]
    return ", ".join(lines[:1] + [line for line in lines if line.startswith(("pid:", "ip:"))])
