"""Run environments that a program passes to a run: classes, objects, actors or clients.

Invariant: the program stops the environments that it started (`shutdown_environments`), and the run stops those that
the run started.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, override

import ray
from pydantic import BaseModel
from ray.actor import ActorHandle

from nemo_rl.config import ClusterConfig
from nemo_rl.distributed.ray_actor_environment_registry import make_actor_runtime_env
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, EpisodeStart
from nemo_rl.environments.registry import env_class_path
from nemo_rl.environments.workers.client import EnvironmentClient
from nemo_rl.environments.workers.loading import class_path, plain_env_class, section_of, worker_keys
from nemo_rl.environments.workers.start import Environment, EnvironmentPool, start_workers
from nemo_rl.utils.errors import ConfigError

if TYPE_CHECKING:
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

type Start = Callable[[dict[str, Any], ClusterConfig], Environment]
"""Function that starts an environment from its configuration and the cluster's deadlines and limits of restarts."""


class ActorEnvironment(EnvironmentInterface[Any]):
    """An environment that passes each call to an actor of the program. The actor is never stopped.

    Args:
        handle: handle of the actor; its class has `step`, and may have the other methods of an environment.
    """

    def __init__(self, handle: ActorHandle) -> None:
        self._handle = handle

    @override
    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn[Any]:
        return self._ask("step", message_log_batch, metadata)

    @override
    def open_episode(self, metadata: Any) -> EpisodeStart[Any]:
        return self._ask("open_episode", metadata) if self._has("open_episode") else EpisodeStart(metadata)

    @override
    def close_episode(self, metadata: Any) -> None:
        if self._has("close_episode"):
            self._ask("close_episode", metadata)

    @override
    def global_post_process_and_metrics(
        self, batch: "BatchedDataDict[Any]"
    ) -> tuple["BatchedDataDict[Any]", dict[str, float | int]]:
        name = "global_post_process_and_metrics"
        return self._ask(name, batch) if self._has(name) else (batch, {})

    def _has(self, method: str) -> bool:
        return hasattr(self._handle, method)

    def _ask(self, method: str, *arguments: Any) -> Any:
        return ray.get(getattr(self._handle, method).remote(*arguments))


def environment_of(name: str, given: Any) -> Environment | Start:
    """Return the client of a running environment, or a function that starts one.

    Args:
        name: name of the task.
        given: a class derived from `EnvironmentInterface` (with `@ray.remote` or without) or its dotted path, which is
            constructed with its section of `env`; an object of such a class; the handle of an actor that hosts one; or
            a client (`create_env`).

    Raises:
        ConfigError: `given` is none of these.
    """
    if isinstance(given, EnvironmentClient | EnvironmentPool):
        return given
    if isinstance(given, ActorHandle):
        if not hasattr(given, "step"):
            raise ConfigError(f"environments[{name!r}] is an actor without a method `step`: {given!r}.")
        given = ActorEnvironment(given)
    hosted = env_class_path(given) if isinstance(given, str) else given
    if not isinstance(hosted, str):
        plain_env_class(hosted)

    def start(cfg: dict[str, Any], cluster: ClusterConfig) -> Environment:
        path = hosted if isinstance(hosted, str) else class_path(plain_env_class(hosted)[0]) or ""
        timeouts = cluster.timeouts
        return start_workers(
            name,
            hosted,
            cfg,
            worker_keys(name, cfg, timeouts.environment_s),
            start_timeout_s=timeouts.setup_s,
            max_restarts=cluster.max_actor_restarts,
            runtime_env=make_actor_runtime_env(path, cluster.venvs.get(name), name, timeouts.venv_s),
        )

    return start


def start_environment(
    environment: Environment | Start,
    section: Mapping[str, Any] | BaseModel,
    cluster: ClusterConfig,
    resources: ExitStack,
) -> Environment:
    """Return a running environment, or start one with its section of `env` and stop it when `resources` are closed."""
    if isinstance(environment, EnvironmentClient | EnvironmentPool):
        return environment
    cfg = section_of(section)
    client = environment(cfg, cluster)
    resources.callback(client.shutdown)
    return client


def shutdown_environments(
    task_to_env: Mapping[str, Any] | None, val_task_to_env: Mapping[str, Any] | None = None
) -> None:
    """Stop each environment that a program started once: clients (`create_env`) and actors.

    Sections and classes are skipped, because no process runs for them.

    Args:
        val_task_to_env: environments of validation, some or all of which may also be in `task_to_env`.
    """
    environments = [*(task_to_env or {}).values(), *(val_task_to_env or {}).values()]
    ended: list[Any] = []
    for environment in environments:
        if any(environment is other for other in ended):
            continue
        ended.append(environment)
        if isinstance(environment, EnvironmentClient | EnvironmentPool):
            environment.shutdown()
        elif isinstance(environment, ActorHandle):
            if hasattr(environment, "shutdown"):
                ray.get(environment.shutdown.remote(), timeout=30.0)
            ray.kill(environment)
