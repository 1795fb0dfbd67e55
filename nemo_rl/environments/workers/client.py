"""Call an environment from rollouts, in batches and with deadlines, and replace its actor when the actor dies.

`EnvironmentClient` runs in the driver, on the event loop of the rollouts; `actor` hosts the environment, a plain
object, in a Ray actor that `supervision` keeps running. Invariant: every call ends, either with a result or with an
error of its sample. The run stops only if the environment cannot be kept running.

    rollout coroutines ── step() ──► queue of this tick ── flush ──► task: one Ray call
           ▲                                                        │ waits: its turn, start_timeout_s,
           └────── StepResult for each sample ◄─────────────────────┘ then step_timeout_s

    step, if the class steps samples alone; open_episode, close_episode: one Ray call each, in the same way
    a method that the class does not override is not called

    its turn            the actor has no more calls than it runs at the same time, so that a deadline does not
                        include the time of other calls
    no answer in time   the actor is killed, another is started and the samples are sent one by one; a sample
                        that is too slow alone gets an error; if SIGSTOP had stopped the actor, the batch is sent again.
                        A coroutine that steps one sample is cancelled instead, and the actor continues; if it
                        blocks the others, the actor is killed and what it was doing is sent one by one
    actor died          another is started and what it was doing is sent again; samples that have seen two deaths are
                        sent one by one; a sample during which the actor dies then gets an error, because it probably
                        causes the deaths
    too many deaths     without an answer in between: WorkerDiedError for all calls, now and later
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.workers.results import WORKER_DEATHS
from nemo_rl.environments.interfaces import EnvironmentInterface, EpisodeStart, StepResult
from nemo_rl.environments.workers.actor import host_of
from nemo_rl.environments.workers.loading import EnvironmentClass, launch_environment_actor, plain_env_class, traits_of
from nemo_rl.environments.workers.supervision import SupervisedActor, answer_of, construction_error, death_in_short
from nemo_rl.host.boundary import Boundary
from nemo_rl.utils.errors import ConfigError, WorkerDiedError

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import LLMMessageLogType

logger = logging.getLogger(__name__)

_DEATHS_BEFORE_SPLIT = 2
_LATER_S = 10.0
"""Seconds that the driver waits beyond the actor's own deadline, which the actor misses while a coroutine blocks."""


@dataclass(frozen=True)
class _Call:
    """A call of one of the actor's methods for one sample."""

    arguments: tuple[Any, ...]
    """Arguments for this sample. The actor's method takes a list of each, with one entry per sample."""
    failed: Callable[[str, bool], Any]
    """Function that makes the sample's result from the reason of a failure and whether the environment hung or died."""


@dataclass(eq=False)
class _WaitingSample:
    """A sample whose coroutine is waiting for its step."""

    call: _Call
    future: "asyncio.Future[StepResult]"


class EnvironmentClient:
    """Client of one environment. It serves one event loop at a time and is not thread-safe.

    The constructor starts the actor in the background.

    Args:
        name: For logs and errors, usually the task name.
        env_class: A class, its dotted path, or an environment object.
        cfg: Argument of the class's constructor.
        step_timeout_s: Deadline of one sample's step: `step_timeout_s` of the section, or else
            `cluster.timeouts.environment_s`.
        start_timeout_s: Deadline of the actor's start.
        max_restarts: Largest number of times that the actor may be replaced without an answer in between
            (`cluster.max_actor_restarts`).
        runtime_env: Ray's runtime environment of the actor; see `make_actor_runtime_env`.
        max_memory_gb: GiB that the actor and the processes that it starts may use together, or None for no limit.

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
        max_memory_gb: float | None = None,
    ) -> None:
        self.name = name
        self.num_calls = 0
        runtime_env = runtime_env or {}
        self._traits = traits_of(env_class, runtime_env, start_timeout_s)
        self.is_own = self._traits.calls_own_code or not module_of(env_class).startswith("nemo_rl.")
        self._section = cfg
        self._step_timeout_s = step_timeout_s
        self._deadline_s = step_timeout_s + (_LATER_S if self._traits.is_async else 0.0)
        self._max_memory_gb = max_memory_gb
        host = host_of(self._traits, step_timeout_s, max_memory_gb)
        start = partial(launch_environment_actor, host, env_class, cfg, self._traits, runtime_env)
        self._actor = SupervisedActor(name, start, start_timeout_s=start_timeout_s, max_restarts=max_restarts)
        self._turns = asyncio.Semaphore()
        self._suspects = asyncio.Lock()
        self._queue: list[_WaitingSample] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_restarts(self) -> int:
        """The number of times that the actor was replaced."""
        return self._actor.num_restarts

    @property
    def post_processes_groups(self) -> bool:
        """True if groups are post-processed one by one (`EnvironmentInterface.post_processes_groups`)."""
        return self._traits.post_processes_groups

    @property
    def reads_chat(self) -> bool:
        """True if the prompt's messages are read (`EnvironmentInterface.reads_chat`)."""
        return self._traits.reads_chat

    @property
    def continues_episodes(self) -> bool:
        """True if a new process can continue episodes (`EnvironmentInterface.continues_episodes`)."""
        return self._traits.continues_episodes

    @property
    def agent_section(self) -> Mapping[str, Any] | None:
        """The section of an environment with `EnvironmentInterface.runs_agents`, or None for other environments."""
        return self._section if self._traits.runs_agents else None

    @property
    def is_pooled(self) -> bool:
        """True if several actors may run the environment (`EnvironmentInterface.pooled`)."""
        return self._traits.pooled

    @property
    def reads_collections(self) -> bool:
        """True if `global_post_process_and_metrics` is called for whole collections."""
        return "global_post_process_and_metrics" in self._traits.hooks and not self.post_processes_groups

    async def step(self, message_log: "LLMMessageLogType", metadata: Any) -> StepResult:
        """Pass the last turn of one conversation to the environment.

        Calls that arrive in the same tick of the event loop are sent in one Ray call, unless the class steps each
        sample alone. Only `role` and `content` of the messages are sent, and `token_ids` if the class reads them.

        Args:
            message_log: The conversation so far.
            metadata: `extra_env_info` in the first turn, later `metadata` of the last result.

        Returns:
            The result; its `error` is set if the environment raised, hung or died.

        Raises:
            WorkerDiedError: The environment cannot be started or kept running, or was shut down.
        """
        loop = self._running_loop()
        keys = ("role", "content", "token_ids") if self._traits.reads_token_ids else ("role", "content")
        texts = [{key: turn[key] for key in keys} for turn in message_log]
        call = _Call((texts, metadata), lambda reason, aborted: StepResult.failed(reason, metadata, aborted=aborted))
        if self._traits.steps_samples_alone:
            results = await self._together("step", [call])
            self._report_errors(results)
            return results[0]
        waiting = _WaitingSample(call, loop.create_future())
        self._queue.append(waiting)
        if len(self._queue) == 1:
            loop.call_soon(self._flush)
        return await waiting.future

    async def open_episode(self, metadata: Any, seed: int | None = None) -> EpisodeStart[Any]:
        """Open the episode of one sample.

        Args:
            metadata: `extra_env_info` of the prompt.
            seed: seed of the sample's episode, which the environment gets as `episode_seed` if the metadata is a dict,
                or None for no seed.

        Returns:
            The start of the episode; its `error` is set if the environment raised, hung or died.

        Raises:
            WorkerDiedError: The environment cannot be started or kept running, or was shut down.
        """
        if "open_episode" not in self._traits.hooks:
            return EpisodeStart(metadata)
        self._running_loop()
        seeded = {**metadata, "episode_seed": seed} if seed is not None and isinstance(metadata, dict) else metadata
        call = _Call((seeded,), lambda reason, aborted: EpisodeStart(metadata, error=reason, aborted=aborted))
        (start,) = await self._together("open_episode", [call])
        return start

    async def close_episode(self, metadata: Any) -> None:
        """Close the episode of one sample. Errors are logged, not raised."""
        if "close_episode" not in self._traits.hooks or self._actor.failure is not None:
            return
        self._running_loop()
        try:
            (error,) = await self._together("close_episode", [_Call((metadata,), lambda reason, _: reason)])
        except WorkerDiedError:
            return  # the episode died with the actor; coroutines that wait for a step report it
        if error is not None:
            logger.warning("Environment %r could not close an episode: %s", self.name, error)

    async def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """Let the environment correct the rewards of a finished batch and compute metrics.

        Returns:
            The batch with the `rewards` that the environment returned, and its metrics. If the environment raised or
            took too long, the method logs a warning and returns the same batch and no metrics.

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
            except WORKER_DEATHS:
                continue  # `_call` has replaced the actor, or raises
            except TimeoutError:
                reason = f"no answer in {self._step_timeout_s:g} s (step_timeout_s)"
            except RayTaskError as error:
                reason = _last_line(error)
            else:
                if outcome is None:
                    continue
                return outcome
            logger.warning("Environment %r gives no metrics, %s failed: %s", self.name, name, reason)
            return batch, {}

    def try_out(self, conversation: list[dict[str, str]], metadata: Any, timeout_s: float) -> str | None:
        """Play one turn with an invented answer before any rollout, and block until the turn is graded.

        Args:
            conversation: prompt and answer, messages with `role` and `content`.
            metadata: `extra_env_info` of the prompt.
            timeout_s: limit for the start of the environment and the turn.

        Returns:
            Why the environment gave no reward. None if it gave one, or if it is an environment that runs agents.

        Raises:
            ConfigError: its constructor failed.
        """
        if self._traits.runs_agents:
            return None
        running = self._actor.running()
        try:
            ray.get(running.ready, timeout=timeout_s)
            if "open_episode" in self._traits.hooks:
                seeded = {**metadata, "episode_seed": 0} if isinstance(metadata, dict) else metadata
                start: Any = ray.get(running.handle.open_episode.remote([seeded]), timeout=timeout_s)[0]
                if start.error is not None:
                    return str(start.error)
                metadata = start.metadata
            result: Any = ray.get(running.handle.step.remote([conversation], [metadata]), timeout=timeout_s)[0]
            if "close_episode" in self._traits.hooks:
                ray.get(running.handle.close_episode.remote([metadata]), timeout=timeout_s)
        except WORKER_DEATHS as error:
            if not getattr(error, "actor_init_failed", False):
                return death_in_short(error)
            raise ConfigError(
                f"environment {self.name!r} could not be constructed: {construction_error(error)}"
            ) from error
        except GetTimeoutError:
            return f"no answer in {timeout_s:g} s"
        reason: str | None = result.error
        return reason

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Stop the actor and everything it started, so that later steps raise. A second call does nothing.

        Args:
            timeout_s: Limit for the environment's own `shutdown`, after which the actor is killed.
        """
        self._actor.shutdown(timeout_s)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of the caller, with an empty queue if the loop is new."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._queue, self._loop = [], loop
            self._turns, self._suspects = asyncio.Semaphore(self._traits.concurrency), asyncio.Lock()
        return loop

    def _flush(self) -> None:
        """Send the samples of this tick of the event loop in a new task."""
        batch, self._queue = self._queue, []
        task = asyncio.get_running_loop().create_task(self._run(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, batch: list[_WaitingSample]) -> None:
        """Give each waiting coroutine its result, or the exception that stops the run."""
        with Boundary(Exception) as caught:  # each waiting coroutine raises it
            results = await self._together("step", [waiting.call for waiting in batch])
        if caught:
            error = caught.take()
            for waiting in batch:
                if not waiting.future.done():
                    waiting.future.set_exception(error)
            return
        self._report_errors(results)
        for waiting, result in zip(batch, results, strict=True):
            if not waiting.future.done():
                waiting.future.set_result(result)

    async def _together(self, method: str, batch: Sequence[_Call]) -> list[Any]:
        """Make calls in one Ray call, which is repeated if the actor dies, and one by one if that fails too."""
        for _ in range(_DEATHS_BEFORE_SPLIT):
            try:
                return await self._answers(method, batch)
            except TimeoutError:
                if self._traits.is_async:
                    break  # one coroutine blocks all others, so any call may be the cause
                if len(batch) == 1:
                    return [self._too_slow(batch[0])]
                return await self._apart(method, batch)
            except RayTaskError as error:
                if len(batch) == 1:
                    return [batch[0].failed(f"its answer cannot be sent: {_last_line(error)}", False)]
                return await self._apart(method, batch)
            except WORKER_DEATHS:
                continue
        return [await self._suspected(method, call) for call in batch]

    async def _apart(self, method: str, batch: Sequence[_Call]) -> list[Any]:
        """Make each call in its own Ray call."""
        apart = await asyncio.gather(*(self._together(method, [one]) for one in batch))
        return [result for (result,) in apart]

    async def _suspected(self, method: str, call: _Call) -> Any:
        """Make a call that may have ended the actor. Calls of this kind run one at a time."""
        async with self._suspects:
            try:
                return (await self._answers(method, [call]))[0]
            except TimeoutError:
                return self._too_slow(call)
            except WORKER_DEATHS:
                num_deaths = _DEATHS_BEFORE_SPLIT + 1
                self._actor.note_blamed()
                excess = self._actor.last_excess
                why = f"; it used {excess}" if self._max_memory_gb is not None and excess is not None else ""
                return call.failed(f"environment {self.name!r} died {num_deaths} times over this sample{why}", True)

    def _too_slow(self, call: _Call) -> Any:
        return call.failed(f"environment {self.name!r} gave no answer in {self._step_timeout_s:g} s", True)

    async def _answers(self, method: str, batch: Sequence[_Call]) -> list[Any]:
        """Make calls in one Ray call, repeat it if `_call` returns None, and raise the errors of `_call`."""
        columns = [list(column) for column in zip(*(call.arguments for call in batch), strict=True)]
        while True:
            answers: list[Any] | None = await self._call(method, *columns)
            if answers is not None:
                return answers

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor, or return None if the call has to be repeated.

        It must be repeated if the deadline of another call ended the actor, or if SIGSTOP had stopped the actor. In
        these cases, and if the actor times out or dies, the actor is replaced.
        """
        async with self._turns:
            incarnation = self._actor.running()
            try:
                await self._actor.until_ready(incarnation)
                self.num_calls += 1
                call: ray.ObjectRef[Any] = getattr(incarnation.handle, method).remote(*arguments)
                outcome = await answer_of(call, self._deadline_s)
            except TimeoutError:
                self._actor.end_hung(incarnation, f"no answer in {self._step_timeout_s:g} s")
                if incarnation.was_stopped:
                    return None
                raise
            except WORKER_DEATHS as error:
                if incarnation.ended_by_us:
                    return None
                self._actor.replace(incarnation, await self._actor.cause_of_death(incarnation, error))
                raise
        self._actor.note_answer()
        return outcome

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


def module_of(env_class: str | EnvironmentClass | EnvironmentInterface[Any]) -> str:
    """Return the module of an environment's class."""
    if isinstance(env_class, str):
        return env_class
    return str(plain_env_class(env_class)[0].__module__) + "."


def _last_line(error: RayTaskError) -> str:
    """Return the line of Ray's report that names the error."""
    return str(error).strip().splitlines()[-1]
