"""The environments of a run: those of the configuration, and those that its program handed in."""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Any

from nemo_rl.config import RolloutMasterConfig
from nemo_rl.environments.client import EnvironmentClient
from nemo_rl.environments.registry import env_class_path
from nemo_rl.environments.user_environments import environment_of, start_environment
from nemo_rl.utils.errors import ConfigError


def check_environments(config: RolloutMasterConfig, tasks: Collection[str], handed_in: Mapping[str, Any]) -> None:
    """Refuse what is no environment, and tasks that nothing rewards; starts nothing.

    Args:
        config: the run's configuration; `env` has a section for each environment.
        tasks: named by the data.
        handed_in: environments by task name, see `environments.user_environments.environment_of`.

    Raises:
        ConfigError: as said.
    """
    for task in tasks:
        if task not in config.env:
            known = ", ".join(sorted(config.env)) or "none"
            raise ConfigError(
                f"the data has rows of the task {task!r}, which no environment rewards; there are: {known}. Hand one "
                f"in as environments={{{task!r}: ...}}, or write a section env.{task}."
            )
    for name in {*tasks, *handed_in}:
        environment_of(name, _given(name, handed_in))


def start_environments(
    config: RolloutMasterConfig, tasks: Collection[str], handed_in: Mapping[str, Any], resources: ExitStack
) -> dict[str, EnvironmentClient]:
    """Start what does not run yet, in the background; arguments as `check_environments`.

    Args:
        config: the run's configuration.
        tasks: named by the data.
        handed_in: environments by task name.
        resources: where what is started here is registered; what ran before goes on behind the run.
    """
    return {
        name: start_environment(
            environment_of(name, _given(name, handed_in)), config.env[name], config.cluster, resources
        )
        for name in dict.fromkeys([*tasks, *handed_in])
    }


def _given(name: str, handed_in: Mapping[str, Any]) -> Any:
    return handed_in[name] if name in handed_in else env_class_path(name)
