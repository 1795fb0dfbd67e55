"""Call an environment from rollouts: in batches, with deadlines, and with a new actor when the old one dies.

The client runs in the driver, on the event loop of the rollouts; the environment runs in the Ray actor of `actor`.
Invariant: every call ends, with a result or with an error of its sample; the run stops only if the environment cannot
be kept running.

    rollout coroutines ── step() ──► queue of this tick ── flush ──► task: one Ray call
           ▲                                                        │ waits: its turn, start_timeout_s,
           └────── StepResult for each sample ◄─────────────────────┘ then step_timeout_s

    open_episode, close_episode: one Ray call each, in the same way; no call if the class does not override the method

    its turn            the actor has no more calls than it runs at the same time, so that a deadline does not
                        include the time of other calls
    no answer in time   the actor is killed, another is started and the samples are sent one by one; a sample
                        that is too slow alone gets an error; if SIGSTOP had stopped the actor, the batch is sent again
    actor died          another is started and the batch is sent again; after two deaths during a batch its
                        samples are sent one by one; after three deaths during a sample (two of them
                        in a batch) it gets an error, because it probably causes them
    too many deaths     without an answer in between: WorkerDiedError for all calls, now and later
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from nemo_rl.environments.actor import launch_environment_actor, traits_of
from nemo_rl.environments.interfaces import EnvironmentInterface, EpisodeStart, StepResult
from nemo_rl.environments.loading import EnvironmentClass
from nemo_rl.host.processes import is_stopped
from nemo_rl.utils.errors import WorkerDiedError

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import LLMMessageLogType
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

logger = logging.getLogger(__name__)

_DEATHS_BEFORE_SPLIT = 2
_DEATHS_BEFORE_BLAME = 3


@dataclass(frozen=True)
class _Call:
    """The call for one sample.

    Attributes:
        arguments: arguments of the actor's method, which takes a list of each.
        failed: makes the result of the sample from the reason, if the environment hung or died.
    """

    arguments: tuple[Any, ...]
    failed: Callable[[str], Any]


@dataclass(eq=False)
class _Waiting:
    """A sample whose coroutine is waiting for its step."""

    call: _Call
    future: "asyncio.Future[StepResult]"


@dataclass(eq=False)
class _Incarnation:
    """One actor process of the environment."""

    handle: ActorHandle
    ready: "ray.ObjectRef[int]"
    ended_by_us: bool = False
    pid: int | None = None


class EnvironmentClient:
    """A client of one environment, for one event loop at a time; not thread-safe.

    The actor is started by the constructor, in the background.

    Args:
        name: For logs and errors, usually the task name.
        env_class: A class, its dotted path, or an environment object.
        cfg: Argument of the class's constructor.
        step_timeout_s: Deadline of one sample's step (`cluster.timeouts.environment_s`).
        start_timeout_s: Deadline of the actor's start.
        max_restarts: How often in a row the actor may be replaced without an answer in between
            (`cluster.max_actor_restarts`).
        runtime_env: Ray's runtime environment of the actor; see `make_actor_runtime_env`.

    Raises:
        ConfigError: There is no such class.
    """

    def __init__(
        self,
        name: str,
        env_class: str | EnvironmentClass | EnvironmentInterface[Any],
        cfg: dict[str, Any],
        *,
        step_timeout_s: float = 600.0,
        start_timeout_s: float = 300.0,
        max_restarts: int = 10,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.num_restarts = 0
        self.num_calls = 0
        self._env_class = env_class
        self._runtime_env = runtime_env or {}
        self._traits = traits_of(env_class, self._runtime_env, start_timeout_s)
        self._cfg = cfg
        self._step_timeout_s = step_timeout_s
        self._start_timeout_s = start_timeout_s
        self._max_restarts = max_restarts
        self._restarts_in_a_row = 0
        self._failure: WorkerDiedError | None = None
        self._turns = asyncio.Semaphore()
        self._queue: list[_Waiting] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._incarnation: _Incarnation | None = self._launch()

    @property
    def post_processes_groups(self) -> bool:
        """See `EnvironmentInterface.post_processes_groups`."""
        return self._traits.post_processes_groups

    async def step(self, message_log: "LLMMessageLogType", metadata: Any) -> StepResult:
        """Pass the last turn of one conversation to the environment.

        Calls that arrive in the same tick of the event loop are sent in one Ray call. Only `role`
        and `content` of the messages are sent.

        Args:
            message_log: The conversation so far.
            metadata: `extra_env_info` at first, then `metadata` of the last result.

        Returns:
            The result; its `error` is set if the environment raised, hung or died.

        Raises:
            WorkerDiedError: The environment cannot be started or kept running, or was shut down.
        """
        loop = self._running_loop()
        texts = [{"role": turn["role"], "content": turn["content"]} for turn in message_log]
        call = _Call((texts, metadata), lambda reason: StepResult.failed(reason, metadata))
        waiting = _Waiting(call, loop.create_future())
        self._queue.append(waiting)
        if len(self._queue) == 1:
            loop.call_soon(self._flush)
        return await waiting.future

    async def open_episode(self, metadata: Any) -> EpisodeStart[Any]:
        """Open the episode of one sample.

        Returns:
            The start of the episode; its `error` is set if the environment raised, hung or died.

        Raises:
            WorkerDiedError: The environment cannot be started or kept running, or was shut down.
        """
        if "open_episode" not in self._traits.hooks:
            return EpisodeStart(metadata)
        self._running_loop()
        call = _Call((metadata,), lambda reason: EpisodeStart(metadata, error=reason))
        (start,) = await self._together("open_episode", [call])
        return start

    async def close_episode(self, metadata: Any) -> None:
        """Close the episode of one sample; errors are logged."""
        if "close_episode" not in self._traits.hooks or self._failure is not None:
            return
        self._running_loop()
        try:
            (error,) = await self._together("close_episode", [_Call((metadata,), str)])
        except WorkerDiedError:
            return  # the episode died with the actor; coroutines that wait for a step report it
        if error is not None:
            logger.warning("Environment %r could not close an episode: %s", self.name, error)

    async def global_post_process_and_metrics(
        self, batch: "BatchedDataDict[Any]"
    ) -> tuple["BatchedDataDict[Any]", dict[str, float | int]]:
        """Let the environment correct the rewards of a finished batch and compute metrics.

        Returns:
            A batch with the `rewards` that the environment returned, and its metrics. If it raised or took too long,
            the same batch and no metrics, with a warning.

        Raises:
            WorkerDiedError: The environment cannot be kept running.
        """
        name = "global_post_process_and_metrics"
        if name not in self._traits.hooks:
            return batch, {}
        self._running_loop()
        while True:
            try:
                outcome = await self._call(name, batch)
            except RayActorError:
                continue  # `_call` has replaced the actor, or raises
            except TimeoutError:
                reason = f"no answer in {self._step_timeout_s:g} s (cluster.timeouts.environment_s)"
            except RayTaskError as error:
                reason = str(error).strip().splitlines()[-1]
            else:
                if outcome is None:
                    continue
                return outcome
            logger.warning("Environment %r gives no metrics, %s failed: %s", self.name, name, reason)
            return batch, {}

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Stop the actor and what it started; later steps raise. A second call does nothing.

        Args:
            timeout_s: Limit for the environment's own `shutdown`, after which the actor is killed.
        """
        incarnation, self._incarnation = self._incarnation, None
        self._failure = WorkerDiedError(f"environment {self.name!r} was shut down")
        if incarnation is None:
            return
        try:
            ray.get(incarnation.handle.shutdown.remote(), timeout=timeout_s)
        except (GetTimeoutError, RayActorError, RayTaskError) as error:
            logger.warning("Environment %r did not shut down by itself: %s", self.name, error)
        ray.kill(incarnation.handle)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of the caller; a new loop starts with an empty queue."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._queue, self._loop = [], loop
            self._turns = asyncio.Semaphore(self._traits.concurrency)
        return loop

    def _flush(self) -> None:
        """Send the samples of this tick, in a new task."""
        batch, self._queue = self._queue, []
        task = asyncio.get_running_loop().create_task(self._run(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, batch: list[_Waiting]) -> None:
        """Give each waiting coroutine its result, or the exception that stops the run."""
        try:
            results = await self._together("step", [waiting.call for waiting in batch])
        except Exception as error:  # relay: each waiting coroutine raises it
            for waiting in batch:
                if not waiting.future.done():
                    waiting.future.set_exception(error)
            return
        self._report_errors(results)
        for waiting, result in zip(batch, results, strict=True):
            if not waiting.future.done():
                waiting.future.set_result(result)

    async def _together(self, method: str, batch: Sequence[_Call], num_deaths: int = 0) -> list[Any]:
        """Make calls in one Ray call; repeat it after a death of the actor, and split it after a timeout."""
        while True:
            try:
                columns = [list(column) for column in zip(*(call.arguments for call in batch), strict=True)]
                results = await self._call(method, *columns)
                if results is not None:
                    return results
            except TimeoutError:
                if len(batch) > 1:
                    apart = await asyncio.gather(*(self._together(method, [one], num_deaths) for one in batch))
                    return [result for (result,) in apart]
                return [batch[0].failed(f"environment {self.name!r} gave no answer in {self._step_timeout_s:g} s")]
            except RayActorError:
                num_deaths += 1
            if len(batch) > 1 and num_deaths >= _DEATHS_BEFORE_SPLIT:
                return [(await self._together(method, [one], num_deaths))[0] for one in batch]
            if num_deaths >= _DEATHS_BEFORE_BLAME:
                return [batch[0].failed(f"environment {self.name!r} died {num_deaths} times over this sample")]

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor; return None if another call timed out or SIGSTOP had stopped the actor.

        The actor is replaced then. `pid` may belong to another machine; a stopped process with the same number here
        costs one more attempt.

        Raises:
            TimeoutError: No answer in time; the actor is replaced.
            RayActorError: The actor died; it is replaced.
        """
        async with self._turns:
            incarnation = self._living()
            try:
                await self._until_ready(incarnation)
                self.num_calls += 1
                call: ray.ObjectRef[Any] = getattr(incarnation.handle, method).remote(*arguments)
                outcome = await _answer(call, self._step_timeout_s)
            except TimeoutError:
                was_stopped = incarnation.pid is not None and is_stopped(incarnation.pid)
                self._end_hung(incarnation)
                if was_stopped:
                    return None
                raise
            except RayActorError as error:
                if incarnation.ended_by_us:
                    return None
                self._replace(incarnation, _death_in_short(error))
                raise
        self._restarts_in_a_row = 0
        return outcome

    async def _until_ready(self, incarnation: _Incarnation) -> None:
        """Wait until the environment is constructed.

        Raises:
            WorkerDiedError: Its constructor raised, or took longer than `start_timeout_s`.
            RayActorError: The process died while it started.
        """
        try:
            incarnation.pid = await _answer(incarnation.ready, self._start_timeout_s)
        except TimeoutError as error:
            reason = f"did not start in {self._start_timeout_s:g} s"
            raise self._fail(reason) from error
        except RayActorError as error:
            if error.actor_init_failed:
                raise self._fail(f"could not be constructed: {error}") from error
            raise

    def _launch(self) -> _Incarnation:
        handle = launch_environment_actor(self._env_class, self._cfg, self._traits, self._runtime_env)
        return _Incarnation(handle, handle.ready.remote())

    def _living(self) -> _Incarnation:
        """Return the running actor; start one if there is none."""
        if self._failure is not None:
            raise self._failure
        if self._incarnation is None:
            self._incarnation = self._launch()
        return self._incarnation

    def _end_hung(self, incarnation: _Incarnation) -> None:
        """Kill an actor that missed a deadline; its other batches are sent again."""
        incarnation.ended_by_us = True
        self._replace(incarnation, f"no answer in {self._step_timeout_s:g} s")

    def _replace(self, incarnation: _Incarnation, reason: str) -> None:
        """Kill an actor, once, and count it against the limit of restarts."""
        if self._incarnation is not incarnation:
            return
        ray.kill(incarnation.handle)
        self._incarnation = None
        self.num_restarts += 1
        self._restarts_in_a_row += 1
        if self._restarts_in_a_row > self._max_restarts:
            self._fail(
                f"died once more after {self._max_restarts} restarts without an answer in between "
                f"(cluster.max_actor_restarts); last: {reason}"
            )
            return
        logger.warning(
            "The actor of environment %r ended (%s); starting it again (%d of at most %d in a row)",
            self.name,
            reason,
            self._restarts_in_a_row,
            self._max_restarts,
        )

    def _fail(self, reason: str) -> WorkerDiedError:
        """Stop the client permanently."""
        if self._failure is None:
            self._failure = WorkerDiedError(f"environment {self.name!r} {reason}")
        if self._incarnation is not None:
            ray.kill(self._incarnation.handle)
            self._incarnation = None
        return self._failure

    def _report_errors(self, results: list[StepResult]) -> None:
        errors = [result.error for result in results if result.error is not None]
        if errors:
            logger.warning(
                "Environment %r could not grade %d of %d samples; the first: %s",
                self.name,
                len(errors),
                len(results),
                errors[0],
            )


async def _answer(call: "ray.ObjectRef[Any]", timeout_s: float) -> Any:
    """Await a Ray call with a deadline; raises TimeoutError or what the call raised."""
    return await asyncio.wait_for(asyncio.wrap_future(call.future()), timeout_s)


def _death_in_short(error: RayActorError) -> str:
    """Return the lines of Ray's report that name what died: the first, and the process and node."""
    lines = [line.strip() for line in str(error).splitlines()]
    return ", ".join(lines[:1] + [line for line in lines if line.startswith(("pid:", "ip:"))])
