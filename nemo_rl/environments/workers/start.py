"""Start the actors of an environment."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from nemo_rl.environments.interfaces import EnvironmentInterface
from nemo_rl.environments.workers.client import EnvironmentClient
from nemo_rl.environments.workers.keys import WorkerKeys
from nemo_rl.environments.workers.loading import EnvironmentClass
from nemo_rl.environments.workers.pool import EnvironmentPool

type Environment = EnvironmentClient | EnvironmentPool


def start_workers(
    name: str,
    env_class: str | EnvironmentClass | EnvironmentInterface[Any],
    cfg: dict[str, Any],
    keys: WorkerKeys,
    *,
    start_timeout_s: float = 300.0,
    max_restarts: int = 10,
    runtime_env: Mapping[str, Any] | None = None,
) -> Environment:
    """Start the actors of an environment, in the background: several if its class is `pooled`.

    Args:
        name: For logs and errors, usually the task name.
        env_class: A class, its dotted path, or an environment object.
        cfg: Argument of the class's constructor.
        keys: How many actors, and what bounds them.
        start_timeout_s: As `EnvironmentClient`.
        max_restarts: As `EnvironmentClient`, for each actor.
        runtime_env: As `EnvironmentClient`.

    Raises:
        ConfigError: There is no such class.
    """
    start = partial(
        EnvironmentClient,
        name,
        env_class,
        cfg,
        step_timeout_s=keys.step_timeout_s,
        start_timeout_s=start_timeout_s,
        max_restarts=max_restarts,
        runtime_env=runtime_env,
        max_memory_gb=keys.max_memory_gb,
    )
    first = start()
    num_workers = keys.num_workers if first.is_pooled else 1
    if num_workers == 1 and keys.max_open_episodes is None:
        return first
    return EnvironmentPool([first, *(start() for _ in range(1, num_workers))], keys.max_open_episodes)
