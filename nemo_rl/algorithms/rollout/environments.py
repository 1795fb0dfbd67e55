"""Check and start a run's environments, and build the runner that samples rollouts in them."""

import logging
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.config import ClusterConfig, RolloutMasterConfig
from nemo_rl.config.schema.kits import ToolEnvironmentConfig
from nemo_rl.data.datasets.setup import RunData, setup_response_data
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.data.messages.content import text_rules
from nemo_rl.environments.registry import check_environment, env_class_path
from nemo_rl.environments.user_environments import environment_of, start_environment
from nemo_rl.environments.workers.client import EnvironmentClient
from nemo_rl.environments.workers.loading import import_path, load_env_class, section_of, worker_keys
from nemo_rl.environments.workers.start import Environment
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.penalties import ReviewSettings
from nemo_rl.experience.rollouts import RolloutLimits, RolloutRunner
from nemo_rl.experience.runners.actor import RunnerSettings
from nemo_rl.experience.runners.client import RemoteRunner
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.factory import engine_settings
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)


def check_environments(
    sections: Mapping[str, Any], cluster: ClusterConfig, tasks: Collection[str], user_parts: Mapping[str, Any]
) -> None:
    """Check the environments of a run without starting anything.

    Raises:
        ConfigError: A task has no environment, an object is not an environment, or runners cannot start it.
    """
    for task in tasks:
        if task not in sections:
            known = ", ".join(sorted(sections)) or "none"
            raise ConfigError(
                f"the data has rows of the task {task!r}, which no environment rewards; there are: {known}. Hand one "
                f"in as environments={{{task!r}: ...}}, or write a section env.{task}."
            )
    for name in {*tasks, *user_parts}:
        section = section_of(sections[name])
        environment_of(name, _given(name, user_parts, section))
        worker_keys(name, section, cluster.timeouts.environment_s)
        if name not in user_parts:
            check_environment(name, section, construct=name not in cluster.venvs)
    if cluster.rollout_runners and user_parts:
        raise ConfigError(
            f"cluster.rollout_runners={cluster.rollout_runners}: runners start the environments of the section "
            f"`env` themselves, so environments={sorted(user_parts)} cannot be used. Name their classes as keys "
            "of `env`, or use cluster.rollout_runners=0."
        )


def response_data(tokenizer: TokenizerType, config: RolloutMasterConfig, own: Collection[str] = ()) -> RunData:
    """Check all environments except the caller's `own`, and load a run's prompts with the environments' tools.

    Raises:
        ConfigError, DataError: The data, the tools or the parser of tool calls cannot be used.
    """
    used = {entry.env_name for entry in (*config.data.train_entries, *config.data.validation_entries)}
    for name in used:
        if name in config.env and name not in config.cluster.venvs and name not in own:
            check_environment(name, config.env[name], tokenizer)
    tools = {
        name: load_env_class(env_class_path(name))[0].offered_tools(section, tokenizer, f"env.{name}")
        for name, section in config.env.items()
        if isinstance(section, ToolEnvironmentConfig) and name in used
    }
    return setup_response_data(tokenizer, config.data, config.env, tools)


def start_environments(
    sections: Mapping[str, Any],
    cluster: ClusterConfig,
    tasks: Collection[str],
    user_parts: Mapping[str, Any],
    resources: ExitStack,
) -> dict[str, Environment]:
    """Start the environments that are not running yet, in the background.

    Args:
        resources: Stack that ends the environments started here. Environments that ran before continue after the run.
    """
    return {
        name: start_environment(
            environment_of(name, _given(name, user_parts, sections[name])), sections[name], cluster, resources
        )
        for name in dict.fromkeys([*tasks, *user_parts])
    }


def try_own_environments(environments: Mapping[str, Environment], data: RunData, timeout_s: float) -> None:
    """Test user-supplied environments with a made-up answer to their first prompt, before engines start.

    An error whose type shows a mistake in the code ends the run. Any other error is logged as a warning, because an
    environment may fail for an unusual answer, and the sample is then only marked as failed.

    Raises:
        ConfigError: an environment cannot be constructed, or its code has a mistake.
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
"""Error types, at the beginning of an error's text, that show a mistake in the code for any answer."""


def _given(name: str, user_parts: Mapping[str, Any], section: Any) -> Any:
    return user_parts[name] if name in user_parts else env_class_path(name, section)


def make_runner(
    config: RolloutMasterConfig,
    tokenizer: PreTrainedTokenizerBase,
    engines: EngineGroup,
    environments: Mapping[str, Environment],
    review: ReviewSettings,
    threads: ExitStack,
) -> RolloutRunner:
    """Build the object that samples and reviews rollouts, in the driver or in runner actors.

    The stack `threads` ends the event loop and the actors.

    Raises:
        ConfigError: There are fewer engines than runners.
    """
    loop = EventLoopThread()
    threads.callback(loop.close)
    algorithm, cluster = config.algorithm, config.cluster
    limits = RolloutLimits(
        config.policy.max_total_sequence_length,
        algorithm.max_rollout_turns,
        cluster.timeouts.rollout_s,
        algorithm.max_episode_tokens,
    )
    rules = text_rules(config.data)
    if not cluster.rollout_runners:
        optimizations = cluster.optimizations
        reviewer, endpoint = review.make(tokenizer), cluster.agent_endpoint
        return RolloutRunner(engines, environments, tokenizer, limits, loop, rules, optimizations, reviewer, endpoint)
    settings = RunnerSettings(
        engines=engines.workers.workers,
        workers_per_engine=engine_settings(config.policy, cluster, algorithm.seed, load_weights=False).num_workers,
        environments={
            name: (env_class_path(name, config.env[name]), section_of(config.env[name])) for name in environments
        },
        cluster=cluster,
        tokenizer=tokenizer,
        limits=limits,
        text_rules=rules,
        import_path=import_path({}),
        reads_collections=any(environment.reads_collections for environment in environments.values()),
        review=review,
    )
    runner = RemoteRunner(engines, environments, settings, cluster.rollout_runners, loop)
    threads.callback(runner.shutdown, cluster.timeouts.shutdown_s)
    return runner
