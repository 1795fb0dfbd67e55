"""Environment names: from a name in the configuration to a running environment.

Public as `environments.utils`. Invariant: a name leads to exactly one class, and a wrong name is refused before
anything is started.
"""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from pydantic import BaseModel

from nemo_rl.distributed.ray_actor_environment_registry import make_actor_runtime_env
from nemo_rl.environments.client import EnvironmentClient
from nemo_rl.utils.did_you_mean import did_you_mean
from nemo_rl.utils.errors import ConfigError


class EnvRegistryEntry(TypedDict):
    """Location of the class of a named environment.

    Attributes:
        actor_class_fqn: Dotted path of its class.
        default_processor: Name of the data processor its samples usually need.
    """

    actor_class_fqn: str
    default_processor: NotRequired[str]


_MATH = "nemo_rl.environments.math_environment"

ENV_REGISTRY: dict[str, EnvRegistryEntry] = {
    "math": {"actor_class_fqn": f"{_MATH}.MathEnvironment"},
    "math_default": {"actor_class_fqn": f"{_MATH}.MathEnvironment"},
    "math_multi_reward": {"actor_class_fqn": f"{_MATH}.MathMultiRewardEnvironment"},
}


def register_env(env_name: str, actor_class_fqn: str) -> None:
    """Make an environment class known under a name.

    Args:
        env_name: The name for `env.<name>` and `data.*.env_name`.
        actor_class_fqn: Dotted path of the class; imported when the environment is created.

    Raises:
        ConfigError: The name already leads to another class.
    """
    known = ENV_REGISTRY.get(env_name)
    if known is not None and known["actor_class_fqn"] != actor_class_fqn:
        raise ConfigError(
            f"environment name {env_name!r} already leads to {known['actor_class_fqn']}, so it "
            f"cannot lead to {actor_class_fqn}; choose another name."
        )
    ENV_REGISTRY[env_name] = {"actor_class_fqn": actor_class_fqn}


def env_class_path(env_name: str) -> str:
    """Return the dotted path of an environment's class; a dotted name is its own path.

    Raises:
        ConfigError: The name is neither registered nor dotted; names the nearest.
    """
    if env_name in ENV_REGISTRY:
        return ENV_REGISTRY[env_name]["actor_class_fqn"]
    if "." in env_name:
        return env_name
    hint = did_you_mean(env_name, ENV_REGISTRY)
    raise ConfigError(
        f"unknown environment {env_name!r}.{hint} Known: {', '.join(sorted(ENV_REGISTRY))}; or give "
        "the dotted path of your own class, or register it with "
        "nemo_rl.environments.utils.register_env(name, path)."
    )


def create_env(
    env_name: str,
    env_config: Mapping[str, Any] | BaseModel,
    *,
    step_timeout_s: float = 600.0,
    max_restarts: int = 10,
) -> EnvironmentClient:
    """Start the environment of a name in its own actor, in the background.

    Args:
        env_name: A registered name or the dotted path of a class.
        env_config: Its section of the configuration; the class is constructed with it as a dict.
        step_timeout_s: Deadline of one step (`cluster.timeouts.environment_s`).
        max_restarts: How often its actor may be replaced (`cluster.max_actor_restarts`).

    Returns:
        The client rollouts use. Ray must be initialised.

    Raises:
        ConfigError: Unknown name, or its class cannot be imported or is no environment.
    """
    path = env_class_path(env_name)
    cfg = env_config.model_dump() if isinstance(env_config, BaseModel) else dict(env_config)
    return EnvironmentClient(
        env_name,
        path,
        cfg,
        step_timeout_s=step_timeout_s,
        max_restarts=max_restarts,
        runtime_env=make_actor_runtime_env(path),
    )
