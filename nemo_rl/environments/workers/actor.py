"""Host one environment object in its Ray actor, and catch the errors of the user's code.

    EnvironmentActor        `step` is a function: calls run on the main thread one after another, or on
                            `max_concurrent_steps` threads; a hook that is a coroutine runs on a private event loop
    EnvironmentActorAsync   `step` is a coroutine function: calls run on the actor's event loop, without a thread each;
                            hooks that are functions run on threads

Invariant: a step returns one `StepResult` for each sample unless the process dies; an error becomes part of the result
of its sample.
"""

import asyncio
import copy
import inspect
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from ray import cloudpickle

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.workers.process import LoggedProcess, this_process
from nemo_rl.environments.interfaces import (
    EnvironmentInterface,
    EpisodeStart,
    StepResult,
    check_message,
    split_return,
)
from nemo_rl.environments.user_errors import describe
from nemo_rl.environments.workers.loading import (
    EnvironmentClass,
    EnvironmentTraits,
    Host,
    extend_path,
    load_env_class,
    step_concurrency,
)
from nemo_rl.environments.workers.process_guard import guard_process
from nemo_rl.host.boundary import Boundary
from nemo_rl.host.processes import end_descendants

logger = logging.getLogger(__name__)

_MAX_ERROR_CHARS = 2000

type Metrics = dict[str, float | int]


def host_of(traits: EnvironmentTraits, step_timeout_s: float, max_memory_gb: float | None = None) -> Host:
    """Return the class of the actor for an environment class, with the last arguments of the actor's constructor."""
    if traits.is_async:
        return Host(EnvironmentActorAsync, (max_memory_gb, step_timeout_s))
    return Host(EnvironmentActor, (max_memory_gb,))


def _made(
    env_class: "str | EnvironmentClass | bytes", cfg: dict[str, Any], import_path: Sequence[str]
) -> EnvironmentInterface[Any]:
    """Construct the environment, or unpickle it."""
    extend_path(import_path)
    if isinstance(env_class, str):
        env_class, _ = load_env_class(env_class)
    return cloudpickle.loads(env_class) if isinstance(env_class, bytes) else env_class(cfg)  # type: ignore[call-arg]


class _Calls:
    """The calls of an environment.

    The class is not a base class of the actors, because Ray runs all methods of an actor on one event loop if any of
    these methods is a coroutine function.
    """

    def __init__(self, env: EnvironmentInterface[Any], outcome: Callable[..., Coroutine[Any, Any, Any]]):
        self._env = env
        self._outcome = outcome
        self._step_options: dict[str, Any] = {"return_extracted_answer": True} if env.gives_answers else {}

    async def step(self, message_logs: list[Any], metadata: list[Any]) -> list[StepResult]:
        """Step B samples. If the batch raises, step each sample alone to find the failing ones."""
        if len(metadata) == 1:
            return [await self._step_one(message_logs[0], metadata[0])]
        untouched = copy.deepcopy((message_logs, metadata))
        with Boundary(BaseException) as caught:  # the environment is user code
            return await self.step_batch(message_logs, metadata)
        logger.warning(
            "%s raised for a batch of %d; stepping each sample alone: %s",
            type(self._env).__name__,
            len(metadata),
            _describe(caught.take()),
        )
        return [await self._step_one(log, item) for log, item in zip(*untouched, strict=True)]

    async def _step_one(self, message_log: Any, metadata: Any) -> StepResult:
        with Boundary(BaseException) as caught:  # the environment is user code
            return (await self.step_batch([message_log], [copy.deepcopy(metadata)]))[0]
        return StepResult.failed(_describe(caught.take()), metadata)

    async def step_batch(self, message_logs: list[Any], metadata: list[Any]) -> list[StepResult]:
        """Step B samples, and raise the errors of the environment."""
        step: Any = partial(self._env.step, **self._step_options)
        outcome = await self._outcome(step, message_logs, metadata)
        return split_return(outcome, len(metadata), type(self._env).__name__)

    async def open_one(self, metadata: Any) -> EpisodeStart[Any]:
        """Open an episode, or return a failed start with the error if the environment raises."""
        with Boundary(BaseException) as caught:  # the environment is user code
            start = await self._outcome(self._env.open_episode, copy.deepcopy(metadata))
            if not isinstance(start, EpisodeStart):
                raise TypeError(f"open_episode returned {type(start).__name__}, not an EpisodeStart")
            if start.observation is not None:
                check_message(start.observation, "EpisodeStart.observation")
            return start
        return EpisodeStart(metadata, error=_describe(caught.take()))

    async def close_one(self, metadata: Any) -> str | None:
        """Close an episode, and return its error or None."""
        with Boundary(BaseException) as caught:  # the environment is user code
            await self._outcome(self._env.close_episode, metadata)
        return _describe(caught.take()) if caught else None

    async def post_process(self, batch: BatchedDataDict[Any]) -> tuple[BatchedDataDict[Any], Metrics]:
        """Pass the batch to the environment, with tensors that may be written to, and return its `rewards` and metrics.

        The method raises an error if the rewards are not a tensor or the metrics are not a mapping.
        """
        own = copy.copy(batch)
        own.update({name: value.clone() for name, value in batch.items() if isinstance(value, torch.Tensor)})
        returned, metrics = await self._outcome(self._env.global_post_process_and_metrics, own)
        return BatchedDataDict(rewards=torch.as_tensor(returned["rewards"])), dict(metrics)


class _PrivateLoop:
    """Call methods in the thread of the caller, and run their coroutines on an event loop in its own thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    async def outcome(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method and return its result. If the result is a coroutine, block until it has ended."""
        outcome = method(*arguments)
        if inspect.iscoroutine(outcome):
            return asyncio.run_coroutine_threadsafe(outcome, self._running()).result()
        return outcome

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True).start()
            return self._loop


class EnvironmentActor:
    """Host of an environment whose `step` is a function."""

    def __init__(
        self,
        env_class: "str | EnvironmentClass | bytes",
        cfg: dict[str, Any],
        import_path: Sequence[str] = (),
        max_memory_gb: float | None = None,
    ) -> None:
        guard_process(max_memory_gb)
        self._env = _made(env_class, cfg, import_path)
        self._calls = _Calls(self._env, _PrivateLoop().outcome)

    def ready(self) -> LoggedProcess:
        """Return the actor's process after the environment is constructed."""
        return this_process()

    def step(self, message_logs: list[Any], metadata: list[Any]) -> list[StepResult]:
        """Step B samples. If the batch raises, step each sample alone to find the failing ones."""
        return _without_waiting(self._calls.step(message_logs, metadata))

    def open_episode(self, metadata: list[Any]) -> list[EpisodeStart[Any]]:
        """Open episodes one after another. An episode that raises gets a start with its error."""
        return [_without_waiting(self._calls.open_one(item)) for item in metadata]

    def close_episode(self, metadata: list[Any]) -> list[str | None]:
        """Close episodes one after another, and return for each its error, or None if there was none."""
        return [_without_waiting(self._calls.close_one(item)) for item in metadata]

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """Let the environment correct the `rewards` of a batch, and return them with its metrics."""
        return _without_waiting(self._calls.post_process(batch))

    def shutdown(self) -> None:
        """Let the environment release its resources, and end the processes that the environment left running."""
        try:
            self._env.shutdown()
        finally:
            end_descendants(os.getpid())


class EnvironmentActorAsync:
    """Host of an environment whose `step` is a coroutine function.

    The step of a single sample is cancelled after `step_timeout_s`, while the steps of other samples continue.
    """

    def __init__(
        self,
        env_class: "str | EnvironmentClass | bytes",
        cfg: dict[str, Any],
        import_path: Sequence[str] = (),
        max_memory_gb: float | None = None,
        step_timeout_s: float = 600.0,
    ) -> None:
        guard_process(max_memory_gb)
        self._env = _made(env_class, cfg, import_path)
        self._calls = _Calls(self._env, self._outcome)
        self._step_timeout_s = step_timeout_s
        self._threads = ThreadPoolExecutor(step_concurrency(type(self._env)), "environment")

    async def ready(self) -> LoggedProcess:
        """Return the actor's process after the environment is constructed."""
        return this_process()

    async def step(self, message_logs: list[Any], metadata: list[Any]) -> list[StepResult]:
        """Step B samples. If the batch raises, step each sample alone to find the failing ones."""
        if len(metadata) > 1:
            return await self._calls.step(message_logs, metadata)
        try:
            async with asyncio.timeout(self._step_timeout_s):
                return await self._calls.step(message_logs, metadata)
        except TimeoutError:
            keys = "its key step_timeout_s, or cluster.timeouts.environment_s"
            reason = f"gave no answer in {self._step_timeout_s:g} s ({keys})"
            return [StepResult.failed(f"{type(self._env).__name__} {reason}", metadata[0], aborted=True)]

    async def open_episode(self, metadata: list[Any]) -> list[EpisodeStart[Any]]:
        """Open episodes one after another. An episode that raises gets a start with its error."""
        return [await self._calls.open_one(item) for item in metadata]

    async def close_episode(self, metadata: list[Any]) -> list[str | None]:
        """Close episodes one after another, and return for each its error, or None if there was none."""
        return [await self._calls.close_one(item) for item in metadata]

    async def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """Let the environment correct the `rewards` of a batch, and return them with its metrics."""
        return await self._calls.post_process(batch)

    async def shutdown(self) -> None:
        """Let the environment release its resources, and end the processes that the environment left running."""
        try:
            await self._outcome(self._env.shutdown)
        finally:
            end_descendants(os.getpid())

    async def _outcome(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Run a coroutine on the actor's event loop, or a function on a thread."""
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        outcome = await asyncio.get_running_loop().run_in_executor(self._threads, method, *arguments)
        return await outcome if inspect.iscoroutine(outcome) else outcome


def _without_waiting[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits for the event loop, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("the coroutine waits")


def _describe(error: BaseException) -> str:
    return describe(error)[:_MAX_ERROR_CHARS]
