"""Check and start the environments of a run: configured and user-supplied ones."""

import logging
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Any

from nemo_rl.config import RolloutMasterConfig
from nemo_rl.config.schema.kits import ToolEnvironmentConfig
from nemo_rl.data.datasets.setup import RunData, setup_response_data
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.environments.registry import check_environment, env_class_path
from nemo_rl.environments.user_environments import environment_of, start_environment
from nemo_rl.environments.workers.client import EnvironmentClient
from nemo_rl.environments.workers.loading import load_env_class, section_of, worker_keys
from nemo_rl.environments.workers.start import Environment
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)


def check_environments(config: RolloutMasterConfig, tasks: Collection[str], user_parts: Mapping[str, Any]) -> None:
    """Check the environments of a run without starting anything.

    Args:
        config: the run's configuration; `env` has a section for each environment.
        user_parts: user-supplied environments by task name, see `environments.user_environments.environment_of`.

    Raises:
        ConfigError: a task has no environment, or what was supplied is no environment.
    """
    for task in tasks:
        if task not in config.env:
            known = ", ".join(sorted(config.env)) or "none"
            raise ConfigError(
                f"the data has rows of the task {task!r}, which no environment rewards; there are: {known}. Hand one "
                f"in as environments={{{task!r}: ...}}, or write a section env.{task}."
            )
    for name in {*tasks, *user_parts}:
        environment_of(name, _given(name, user_parts))
        section = section_of(config.env[name])
        worker_keys(name, section, config.cluster.timeouts.environment_s)
        if name not in user_parts:
            check_environment(name, section, construct=name not in config.cluster.venvs)


def response_data(tokenizer: TokenizerType, config: RolloutMasterConfig) -> RunData:
    """Check the environments with the tokenizer, and load the prompts of a run with the tools of their environments.

    Raises:
        ConfigError, DataError: the data cannot be used, or the tools or their parser cannot.
    """
    used = {entry.env_name for entry in (*config.data.train_entries, *config.data.validation_entries)}
    for name in used:
        if name in config.env and name not in config.cluster.venvs:
            check_environment(name, config.env[name], tokenizer)
    tools = {
        name: load_env_class(env_class_path(name))[0].offered_tools(section, tokenizer, f"env.{name}")
        for name, section in config.env.items()
        if isinstance(section, ToolEnvironmentConfig) and name in used
    }
    return setup_response_data(tokenizer, config.data, config.env, tools)


def start_environments(
    config: RolloutMasterConfig, tasks: Collection[str], user_parts: Mapping[str, Any], resources: ExitStack
) -> dict[str, Environment]:
    """Start the environments that do not run yet, in the background.

    Args:
        config: the run's configuration.
        user_parts: user-supplied environments by task name.
        resources: environments that are started here are registered on it. Those that ran before are not, and continue
            after the run.
    """
    return {
        name: start_environment(
            environment_of(name, _given(name, user_parts)), config.env[name], config.cluster, resources
        )
        for name in dict.fromkeys([*tasks, *user_parts])
    }


def try_own_environments(environments: Mapping[str, Environment], data: RunData, timeout_s: float) -> None:
    """Let environments of users grade a made-up answer to their first prompt, before engines start.

    An error that mistakes in code raise ends the run; any other one is a warning, because an environment may refuse an
    answer, whose sample then has an error.

    Args:
        environments: running environments by task name.
        data: the prompts.
        timeout_s: limit for the start and the turn of each.

    Raises:
        ConfigError: an environment cannot be constructed, or has a mistake.
    """
    first: dict[str, Any] = {}
    for part in data.train.parts:
        datum: dict[str, Any] = dict(part[0]) if len(part) else {}
        first.setdefault(str(datum.get("task_name")), datum)
    for name, environment in environments.items():
        datum = first.get(name, {})
        if not isinstance(environment, EnvironmentClient) or not environment.is_own or "message_log" not in datum:
            continue
        prompt = [{"role": turn["role"], "content": str(turn["content"])} for turn in datum["message_log"]]
        answer = {"role": "assistant", "content": "This is a made-up answer."}
        reason = environment.try_out([*prompt, answer], datum["extra_env_info"], timeout_s)
        if reason is not None and reason.startswith(_MISTAKES):
            raise ConfigError(f"environment {name!r} fails for a made-up answer to its first prompt:\n  {reason}")
        if reason is not None:
            logger.warning("Environment %r has no reward for a made-up answer to its first prompt: %s", name, reason)


_MISTAKES = ("AttributeError", "ImportError", "KeyError", "ModuleNotFoundError", "NameError", "TypeError", "Unbound")
"""Beginnings of errors that mistakes in code raise, whatever the answer is."""


def _given(name: str, user_parts: Mapping[str, Any]) -> Any:
    return user_parts[name] if name in user_parts else env_class_path(name)
