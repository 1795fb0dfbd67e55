"""Choose where rollouts are played: in the driver, or in runner actors (`cluster.rollout_runners`)."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.config import RolloutMasterConfig
from nemo_rl.data.messages.content import text_rules
from nemo_rl.environments.registry import env_class_path
from nemo_rl.environments.workers.loading import import_path
from nemo_rl.environments.workers.start import Environment
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.penalties import ReviewSettings
from nemo_rl.experience.rollouts import RolloutLimits, RolloutRunner
from nemo_rl.experience.runners.actor import RunnerSettings
from nemo_rl.experience.runners.client import RemoteRunner
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.factory import engine_settings
from nemo_rl.utils.errors import ConfigError


def check_runners(config: RolloutMasterConfig, user_parts: Mapping[str, Any]) -> None:
    """Refuse environments that a runner cannot start again.

    Args:
        config: the run's configuration.
        user_parts: user-supplied environments by task name.

    Raises:
        ConfigError: there are runners and user-supplied environments.
    """
    if config.cluster.rollout_runners and user_parts:
        raise ConfigError(
            f"cluster.rollout_runners={config.cluster.rollout_runners}: runners start the environments of the section "
            f"`env` themselves, so environments={sorted(user_parts)} cannot be used. Name their classes as keys "
            "of `env`, or use cluster.rollout_runners=0."
        )


def make_runner(
    config: RolloutMasterConfig,
    tokenizer: PreTrainedTokenizerBase,
    engines: EngineGroup,
    environments: Mapping[str, Environment],
    loop: EventLoopThread,
    threads: ExitStack,
    review: ReviewSettings,
) -> RolloutRunner:
    """Build the object that plays rollouts and reviews them, with runner actors registered on `threads`.

    Raises:
        ConfigError: there are fewer engines than runners.
    """
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
        environments={name: (env_class_path(name), config.env[name].model_dump()) for name in environments},
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
