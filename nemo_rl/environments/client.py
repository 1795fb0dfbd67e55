"""Call an environment from rollouts: in batches, with deadlines, and with a new actor when the old one dies.

`EnvironmentClient` runs in the driver, on the event loop of the rollouts; `EnvironmentActor` hosts the environment, a
plain object, in a Ray actor that `supervision` keeps running.
Invariant: every call ends, with a result or with an error of its sample; the run stops only if the environment cannot
be kept running.

    rollout coroutines ── step() ──► queue of this tick ── flush ──► task: one Ray call
           ▲                                                        │ waits: its turn, start_timeout_s,
           └────── StepResult for each sample ◄─────────────────────┘ then step_timeout_s

    open_episode, close_episode: one Ray call each, in the same way; no call if the class does not override the method

    its turn            the actor has no more calls than it runs at the same time, so that a deadline does not
                        include the time of other calls
    no answer in time   the actor is killed, another is started and the samples are sent one by one; a sample
                        that is too slow alone gets an error
    actor died          another is started and the batch is sent again; after two deaths during a batch its
                        samples are sent one by one; after three deaths during a sample (two of them
                        in a batch) it gets an error, because it probably causes them
    too many deaths     without an answer in between: WorkerDiedError for all calls, now and later
"""

import asyncio
import copy
import inspect
import logging
import os
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray import cloudpickle
from ray.exceptions import RayActorError, RayTaskError

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentInterface, EpisodeStart, StepResult, split_return
from nemo_rl.environments.loading import (
    EnvironmentClass,
    extend_path,
    launch_environment_actor,
    load_env_class,
    traits_of,
)
from nemo_rl.environments.supervision import SupervisedActor, answer_of, death_in_short
from nemo_rl.utils.errors import WorkerDiedError

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import LLMMessageLogType

logger = logging.getLogger(__name__)

_DEATHS_BEFORE_SPLIT = 2
_DEATHS_BEFORE_BLAME = 3
_MAX_ERROR_CHARS = 2000


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
        self.num_calls = 0
        runtime_env = runtime_env or {}
        self._traits = traits_of(env_class, runtime_env, start_timeout_s)
        self._step_timeout_s = step_timeout_s
        start = partial(launch_environment_actor, EnvironmentActor, env_class, cfg, self._traits, runtime_env)
        self._actor = SupervisedActor(name, start, start_timeout_s=start_timeout_s, max_restarts=max_restarts)
        self._turns = asyncio.Semaphore()
        self._queue: list[_Waiting] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_restarts(self) -> int:
        """Number of times the actor was replaced."""
        return self._actor.num_restarts

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
        if "close_episode" not in self._traits.hooks or self._actor.failure is not None:
            return
        self._running_loop()
        try:
            (error,) = await self._together("close_episode", [_Call((metadata,), str)])
        except WorkerDiedError:
            return  # the episode died with the actor; coroutines that wait for a step report it
        if error is not None:
            logger.warning("Environment %r could not close an episode: %s", self.name, error)

    async def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
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
        self._actor.shutdown(timeout_s)

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
        """Call a method of the actor; return None if the actor was killed because another call timed out.

        Raises:
            TimeoutError: No answer in time; the actor is replaced.
            RayActorError: The actor died; it is replaced.
        """
        async with self._turns:
            incarnation = self._actor.running()
            try:
                await self._actor.until_ready(incarnation)
                self.num_calls += 1
                call: ray.ObjectRef[Any] = getattr(incarnation.handle, method).remote(*arguments)
                outcome = await answer_of(call, self._step_timeout_s)
            except TimeoutError:
                self._actor.end_hung(incarnation, f"no answer in {self._step_timeout_s:g} s")
                raise
            except RayActorError as error:
                if incarnation.ended_by_us:
                    return None
                self._actor.replace(incarnation, death_in_short(error))
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


class EnvironmentActor:
    """The host of one environment object, in its Ray actor; it catches what the user's code raises.

    `step` returns one `StepResult` for each sample unless the process dies; an error becomes part of the result of its
    sample. Calls run on the actor's main thread one after another, or on `max_concurrent_steps` threads if the
    environment allows more than one; coroutines run on one private event loop.
    """

    def __init__(
        self, env_class: "str | EnvironmentClass | bytes", cfg: dict[str, Any], import_path: Sequence[str] = ()
    ) -> None:
        extend_path(import_path)
        if isinstance(env_class, str):
            env_class, _ = load_env_class(env_class)
        made = cloudpickle.loads(env_class) if isinstance(env_class, bytes) else env_class(cfg)  # type: ignore[call-arg]
        self._env: EnvironmentInterface[Any] = made
        self._step_options = {"return_extracted_answer": True} if made.gives_answers else {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock = threading.Lock()

    def ready(self) -> int:
        """Return the actor's process id, once the environment is constructed."""
        return os.getpid()

    def step(self, message_logs: list[Any], metadata: list[Any]) -> list[StepResult]:
        """Step B samples; if the batch raises, step each sample alone to find those that fail."""
        if len(metadata) == 1:
            return [self._step_one(message_logs[0], metadata[0])]
        untouched = copy.deepcopy((message_logs, metadata))
        try:
            return self._step_batch(message_logs, metadata)
        except (Exception, SystemExit) as error:  # boundary: the environment is user code
            logger.warning(
                "%s raised for a batch of %d; stepping each sample alone: %s",
                type(self._env).__name__,
                len(metadata),
                _describe(error),
            )
        return [self._step_one(log, item) for log, item in zip(*untouched, strict=True)]

    def open_episode(self, metadata: list[Any]) -> list[EpisodeStart[Any]]:
        """Open episodes one after another; an episode that raises gets an error."""
        return [self._open_one(item) for item in metadata]

    def close_episode(self, metadata: list[Any]) -> list[str | None]:
        """Close episodes one after another; return the error of each, or None."""
        return [self._close_one(item) for item in metadata]

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """Pass the batch to the environment, with tensors that it may write; return its `rewards` and metrics.

        Rewards that are no tensor, or metrics that are no mapping, raise an error here.
        """
        own = copy.copy(batch)
        own.update({name: value.clone() for name, value in batch.items() if isinstance(value, torch.Tensor)})
        returned, metrics = self._finished(self._env.global_post_process_and_metrics(own))
        return BatchedDataDict(rewards=torch.as_tensor(returned["rewards"])), dict(metrics)

    def shutdown(self) -> None:
        """Let the environment release what it holds."""
        self._env.shutdown()

    def _step_one(self, message_log: Any, metadata: Any) -> StepResult:
        try:
            return self._step_batch([message_log], [copy.deepcopy(metadata)])[0]
        except (Exception, SystemExit) as error:  # boundary: the environment is user code
            return StepResult.failed(_describe(error), metadata)

    def _step_batch(self, message_logs: list[Any], metadata: list[Any]) -> list[StepResult]:
        outcome = self._finished(self._env.step(message_logs, metadata, **self._step_options))
        return split_return(outcome, len(metadata), type(self._env).__name__)

    def _open_one(self, metadata: Any) -> EpisodeStart[Any]:
        try:
            start = self._finished(self._env.open_episode(copy.deepcopy(metadata)))
            if not isinstance(start, EpisodeStart):
                raise TypeError(f"open_episode returned {type(start).__name__}, not an EpisodeStart")
            return start
        except (Exception, SystemExit) as error:  # boundary: the environment is user code
            return EpisodeStart(metadata, error=_describe(error))

    def _close_one(self, metadata: Any) -> str | None:
        close: Any = self._env.close_episode  # may be a coroutine function
        try:
            self._finished(close(metadata))
        except (Exception, SystemExit) as error:  # boundary: the environment is user code
            return _describe(error)
        return None

    def _finished(self, outcome: Any) -> Any:
        """Return what a method returned; await it if it is a coroutine."""
        if inspect.iscoroutine(outcome):
            return asyncio.run_coroutine_threadsafe(outcome, self._event_loop()).result()
        return outcome

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of all coroutines, which runs in its own thread."""
        with self._loop_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True).start()
            return self._loop


def _describe(error: BaseException) -> str:
    """Describe an error by its type, its text and the innermost line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"[:_MAX_ERROR_CHARS]
