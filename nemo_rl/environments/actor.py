"""Host an environment in a Ray actor, and catch what the user's code raises.

`client` starts and calls the actor; the environment inside is a plain object. Invariant: `step` returns one
`StepResult` for each sample unless the process dies; an error becomes part of the result of its sample.

Calls run on the actor's main thread one after another, or on `max_concurrent_steps` threads if the
environment allows more than one; coroutines run on one private event loop.
"""

import asyncio
import copy
import inspect
import logging
import math
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, EpisodeStart, StepResult
from nemo_rl.environments.loading import EnvironmentClass, class_path, is_environment, load_env_class, plain_env_class
from nemo_rl.utils.errors import ConfigError, DeadlineExceededError

logger = logging.getLogger(__name__)

_MAX_ERROR_CHARS = 2000
_COROUTINE_STEPS = 64
"""Calls of `step` in flight if it is a coroutine function and the class states no number."""


@dataclass(frozen=True)
class EnvironmentTraits:
    """Facts about an environment's class that the driver needs.

    Attributes:
        concurrency: calls that its actor runs at the same time.
        hooks: optional methods that the class overrides.
        options: Ray options of the class's decorator.
        post_processes_groups: as `EnvironmentInterface.post_processes_groups`.
    """

    concurrency: int
    hooks: frozenset[str]
    options: Mapping[str, Any]
    post_processes_groups: bool = False


def traits_of(
    env_class: "str | EnvironmentClass | EnvironmentInterface[Any]",
    runtime_env: Mapping[str, Any],
    timeout_s: float = 300.0,
) -> EnvironmentTraits:
    """Return the traits of a class; a class named by its path is imported by the Python of its actor.

    Args:
        env_class: As in `launch_environment_actor`.
        runtime_env: As in `launch_environment_actor`.
        timeout_s: Limit for starting that Python and importing the class.

    Raises:
        ConfigError: There is no such class, or that Python cannot import it.
        DeadlineExceededError: It took longer than `timeout_s`.
    """
    if not isinstance(env_class, str):
        return _traits(plain_env_class(env_class))
    if not runtime_env:
        return _traits(load_env_class(env_class))
    ask: Any = ray.remote(num_cpus=0, max_retries=0, runtime_env=dict(runtime_env))(_traits_there)
    try:
        return ray.get(ask.remote(env_class, _import_path(runtime_env)), timeout=timeout_s)
    except GetTimeoutError as error:
        place = f"environment class {env_class!r}: the Python {runtime_env.get('py_executable')}"
        raise DeadlineExceededError(f"{place} did not start in {timeout_s:g} s.") from error
    except RayError as error:
        cause = getattr(error, "cause", None)
        raise ConfigError(str(cause if isinstance(cause, ConfigError) else error)) from error


def _traits_there(path: str, import_path: Sequence[str]) -> EnvironmentTraits:
    _extend_path(import_path)
    return _traits(load_env_class(path))


def _traits(loaded: tuple[EnvironmentClass, dict[str, Any]]) -> EnvironmentTraits:
    plain_class, options = loaded
    return EnvironmentTraits(
        step_concurrency(plain_class), own_hooks(plain_class), options, plain_class.post_processes_groups
    )


def launch_environment_actor(
    env_class: "str | EnvironmentClass | EnvironmentInterface[Any]",
    cfg: dict[str, Any],
    traits: EnvironmentTraits,
    runtime_env: Mapping[str, Any],
) -> ActorHandle:
    """Start an actor that hosts the environment; return before it is ready.

    The actor also searches the import path of this process, after its own. With another Python it leaves out the
    packages of this process's Python.

    Args:
        env_class: A class (plain or `@ray.remote`), or its dotted path, which is then imported
            again inside the actor; or an environment object, which is copied into the actor.
        cfg: Argument of the class's constructor.
        traits: Traits of the class.
        runtime_env: Ray's runtime environment, merged over that of the class's decorator.
    """
    hosted: Any = env_class
    if is_environment(env_class):
        hosted = cloudpickle.dumps(env_class)  # unpickled in the actor, where its class can be imported
    elif not isinstance(env_class, str):
        plain_class, _ = plain_env_class(env_class)
        hosted = class_path(plain_class) or plain_class
    options = {"num_cpus": 0, **traits.options, "max_concurrency": traits.concurrency, "max_restarts": 0}
    merged = {**traits.options.get("runtime_env", {}), **runtime_env}
    if merged:
        options["runtime_env"] = merged
    remote_class: Any = ray.remote(EnvironmentActor)
    return remote_class.options(**options).remote(hosted, cfg, _import_path(merged))


def _import_path(runtime_env: Mapping[str, Any]) -> list[str]:
    """Return the folders that the actor searches for modules after its own."""
    own: tuple[str, ...] = ()
    if "py_executable" in runtime_env:
        own = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
        own += (f"{sys.base_prefix}/lib/python{sys.version_info.major}{sys.version_info.minor}.zip",)
    return [entry for entry in sys.path if entry and not f"{entry}/".startswith(tuple(f"{place}/" for place in own))]


def _extend_path(import_path: Sequence[str]) -> None:
    sys.path.extend(entry for entry in import_path if entry not in sys.path)


def step_concurrency(plain_class: EnvironmentClass) -> int:
    """Return how many calls the actor of a class runs at the same time."""
    concurrency = plain_class.max_concurrent_steps
    if inspect.iscoroutinefunction(plain_class.step) and concurrency == 1:
        return _COROUTINE_STEPS
    return concurrency


def own_hooks(plain_class: EnvironmentClass) -> frozenset[str]:
    """Return the names of the optional methods that a class overrides."""
    optional = ("open_episode", "close_episode", "global_post_process_and_metrics")
    return frozenset(name for name in optional if getattr(plain_class, name) is not getattr(EnvironmentInterface, name))


class EnvironmentActor:
    """The host of one environment object; see the module docstring."""

    def __init__(
        self, env_class: "str | EnvironmentClass | bytes", cfg: dict[str, Any], import_path: Sequence[str] = ()
    ) -> None:
        _extend_path(import_path)
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


def split_return(outcome: EnvironmentReturn[Any], num_samples: int, name: str) -> list[StepResult]:
    """Turn what an environment returned for a batch into one result for each sample.

    Raises:
        ValueError: A field does not have one item for each sample.
    """
    components = outcome.rewards if isinstance(outcome.rewards, dict) else {"": outcome.rewards}
    columns: dict[str, Any] = outcome._asdict() | {f"rewards {k}": v for k, v in components.items()}
    for field, column in columns.items():
        if column is not None and field != "rewards" and len(column) != num_samples:
            raise ValueError(f"{name}.step returned {len(column)} {field} for {num_samples} samples")
    rewards = {key: [float(value) for value in column] for key, column in components.items()}
    return [_one_result(outcome, row, rewards) for row in range(num_samples)]


def _one_result(outcome: EnvironmentReturn[Any], row: int, rewards: dict[str, list[float]]) -> StepResult:
    metadata = outcome.metadata[row]
    error = outcome.errors[row] if outcome.errors is not None else None
    values = {name: column[row] for name, column in rewards.items()}
    if error is None and not all(math.isfinite(value) for value in values.values()):
        error = f"the environment returned a reward that is not finite: {list(values.values())}"
    if error is not None:
        return StepResult.failed(error, metadata)
    return StepResult(
        observation=outcome.observations[row],
        metadata=metadata,
        reward=values if isinstance(outcome.rewards, dict) else values[""],
        terminated=bool(outcome.terminateds[row]),
        next_stop_strings=outcome.next_stop_strings[row],
        answer=outcome.answers[row] if outcome.answers is not None else None,
    )


def _describe(error: BaseException) -> str:
    """Describe an error by its type, its text and the innermost line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"[:_MAX_ERROR_CHARS]
