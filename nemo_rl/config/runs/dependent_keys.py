"""Fill in, once and in this order, the keys of a typed configuration that follow from other keys.

    teachers on_policy_distillation -> teachers
    paths    inputs that exist -> their absolute paths, because workers have other working directories
    parsers  generation.vllm_cfg.http_server_serving_chat_kwargs and its plugins -> environments with agents
    budgets  tokens of a microbatch, if they are less than one sample takes -> the tokens of one sample
    runners  data_plane.enabled -> cluster.rollout_runners, where a run can have runners
    tags     env.nemo_gym.thinking_tags -> reward_penalties.thinking_tags
    efforts  env.nemo_gym.effort_levels -> effort_levels
    gym      files of env.nemo_gym that exist, and its log_dir -> their absolute paths
    engine   generation.mcore_generation_config.max_model_len -> engine.max_model_len, with backend=megatron
    memory   generation.colocated.enabled -> engine.gpu_memory_utilization
    source   rollout_source.name=dynamic_sampling -> use_dynamic_sampling, in grpo and in ppo
    overlap  async_rl, or grpo.async_grpo.enabled -> grpo.overlap; ppo.async_ppo.enabled -> ppo.overlap
    modules  logger.record_modules -> policy.dtensor_cfg.compile_layers, if it is null
    saving   megatron_cfg.checkpoint.async_save of a trained model -> checkpointing.is_async

This is done after types are checked and before the rules are. Defaults that are interpolations in the schema have
values by then (`config.base.defaults`). Later code reads plain values. Invariant: a second call changes nothing.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from nemo_rl.config.base.paths import find_path
from nemo_rl.config.base.section import Section
from nemo_rl.config.rules.engines import ranks_of_engine
from nemo_rl.config.rules.topology import plan_topology, trained
from nemo_rl.config.runs.eval import EvalMasterConfig
from nemo_rl.config.runs.rollouts import (
    DistillationMasterConfig,
    GRPOMasterConfig,
    MasterConfig,
    PPOMasterConfig,
    RolloutMasterConfig,
)
from nemo_rl.config.runs.run import RunConfig
from nemo_rl.config.runs.teachers import at_temperature, teacher_sections
from nemo_rl.config.schema.agents import NEMO_GYM, AgentKeys, NemoGymConfig
from nemo_rl.config.schema.algorithms.overlap import AsyncGRPOConfig, AsyncRLConfig
from nemo_rl.config.schema.algorithms.rollout_training import RewardedTrainingConfig, RolloutTrainingConfig
from nemo_rl.config.schema.checkpointing import CheckpointingConfig
from nemo_rl.config.schema.model.generation import GenerationConfig
from nemo_rl.config.schema.model.policy import PolicyConfig
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)


def fill_dependent_keys(config: RunConfig) -> None:
    """Fill in the keys that follow from other keys."""
    if isinstance(config, RolloutMasterConfig):
        _fill_parsers(config.env, config.policy.generation)
    if isinstance(config, EvalMasterConfig):
        _fill_parsers(config.env, config.generation)
    if isinstance(config, RolloutMasterConfig) and config.logger.record_modules:
        section = config.policy.dtensor_cfg
        section.compile_layers = bool(section.compile_layers)  # compiled layers do not call modules
    if isinstance(config, GRPOMasterConfig):
        config.teachers = teacher_sections(config.on_policy_distillation, config.teachers, config.policy)
    if isinstance(config, DistillationMasterConfig) and config.loss_fn.crosses_tokenizers:
        config.teacher = at_temperature(config.teacher, config.policy)
        config.teachers = {name: at_temperature(each, config.policy) for name, each in config.teachers.items()}
    _fill_paths(config)
    if isinstance(config, RolloutMasterConfig | EvalMasterConfig):
        _fill_gym(config.env.get(NEMO_GYM))
    for name, role in config.models.items():
        _fill_budgets(name, role.section, config.policy.max_total_sequence_length, config.rows_of(name))
    if isinstance(config, GRPOMasterConfig):
        name = "grpo.async_grpo" if config.async_rl is None else "async_rl"
        _fill_overlap("grpo", config.grpo, config.policy, config.async_rl or config.grpo.async_grpo, name)
        gym = config.env.get(NEMO_GYM)
        if isinstance(gym, NemoGymConfig) and gym.effort_levels is not None:
            filled_levels = config.model_copy(update={"effort_levels": gym.effort_levels})
            _refuse_other_value("", config, filled_levels, "env.nemo_gym.effort_levels")
            config.effort_levels = gym.effort_levels
        if isinstance(gym, NemoGymConfig) and gym.thinking_tags is not None:
            penalties = config.reward_penalties
            filled = penalties.model_copy(update={"thinking_tags": gym.thinking_tags})
            _refuse_other_value("reward_penalties", penalties, filled, "env.nemo_gym.thinking_tags")
            penalties.thinking_tags = gym.thinking_tags
    if isinstance(config, PPOMasterConfig):
        _fill_overlap("ppo", config.ppo, config.policy, config.ppo.async_ppo, "ppo.async_ppo")
    if isinstance(config, MasterConfig) and config.data_plane.enabled:
        _fill_runners(config)
    for section in config.values():
        generation = section.generation if isinstance(section, PolicyConfig) else section
        if isinstance(generation, GenerationConfig):
            _fill_context(generation)
            _fill_memory(generation)
        if isinstance(section, RewardedTrainingConfig) and section.rollout_source.name == "dynamic_sampling":
            section.use_dynamic_sampling = True
        if isinstance(section, CheckpointingConfig) and _saves_in_background(config):
            section.is_async = True


def _fill_paths(config: RunConfig) -> None:
    for _, section, key in config.path_keys():
        value = getattr(section, key)
        found = None if value is None else find_path(value)
        if found is not None:
            setattr(section, key, str(found))


def _fill_parsers(environments: Mapping[str, Any], generation: GenerationConfig | None) -> None:
    if generation is None:
        return
    vllm, served = generation.vllm_cfg, generation.vllm_cfg.http_server_serving_chat_kwargs
    given = {
        "tool_parser": served and served.tool_parser,
        "reasoning_parser": served and served.reasoning_parser,
        "chat_template_kwargs": served and served.default_chat_template_kwargs,
        "tool_parser_plugin": vllm.tool_parser_plugin,
        "reasoning_parser_plugin": vllm.reasoning_parser_plugin,
    }
    for section in environments.values():
        for key, value in given.items():
            if isinstance(section, AgentKeys) and getattr(section, key) is None:
                setattr(section, key, value)


def _fill_budgets(name: str, section: PolicyConfig, longest: int, rows: int) -> None:
    """Raise each token budget of a microbatch that is smaller than one sample."""
    for way in ("sequence_packing", "dynamic_batching"):
        for key, needed in (("train_mb_tokens", rows * longest), ("logprob_mb_tokens", longest)):
            values = getattr(section, way)
            if values.enabled and getattr(values, key) < needed:
                what = "a pair of rows" if needed > longest else "one row"
                logger.info(
                    "%s.%s.%s=%d is less than %s takes (policy.max_total_sequence_length=%d), so it is %d.",
                    *(name, way, key, getattr(values, key), what, longest, needed),
                )
                setattr(values, key, needed)


def _fill_runners(config: MasterConfig) -> None:
    """Let runners sample the rollouts, one per machine, if the run can have runners and has enough engines."""
    cluster = config.cluster
    if cluster.rollout_runners:
        return
    engines = 1
    if config.policy.generation is not None:
        topology = plan_topology(config.policy_cluster, config.policy)
        engines = topology.generation_ranks // ranks_of_engine(config.policy.generation.engine)
    broken = set(config.findings())
    cluster.rollout_runners = max(min(cluster.num_nodes, engines), 1)
    reason = next((finding for finding in config.findings() if finding not in broken), None)
    if reason is None:
        logger.info("data_plane.enabled=true: cluster.rollout_runners=%d.", cluster.rollout_runners)
        return
    cluster.rollout_runners = 0
    logger.info("data_plane.enabled=true, but rows pass the driver: %s", reason)


def _fill_gym(section: Any) -> None:
    if isinstance(section, NemoGymConfig):
        section.config_paths = [str(find_path(path) or path) for path in section.config_paths]
        section.command[1:] = [str(find_path(part) or part) for part in section.command[1:]]
        section.log_dir = str(Path(section.log_dir).absolute())


def _fill_context(generation: GenerationConfig) -> None:
    context = generation.mcore_generation_config.max_model_len
    if generation.backend == "megatron" and context is not None:
        generation.engine.max_model_len = context
    if generation.backend == "sglang" and generation.sglang_cfg.server_args.get("context_length") is not None:
        generation.engine.max_model_len = generation.sglang_cfg.server_args["context_length"]


def _fill_memory(generation: GenerationConfig) -> None:
    generation.engine.gpu_memory_utilization = generation.memory_share


def _fill_overlap(
    section: str,
    algorithm: RolloutTrainingConfig,
    policy: PolicyConfig,
    asked: AsyncGRPOConfig | AsyncRLConfig | None,
    name: str,
) -> None:
    """Set `overlap`, and with vLLM `weight_sync.recompute_kv_cache`, from the section of NeMo RL in `asked`."""
    if asked is None or (isinstance(asked, AsyncGRPOConfig) and not asked.enabled):
        return
    own = algorithm.overlap
    filled = asked.overlap.model_copy(update={"validation": own.validation})  # not a key of NeMo RL
    _refuse_other_value(f"{section}.overlap", own, filled, name)
    algorithm.overlap = filled
    recomputes = asked.recompute_kv_cache_after_weight_updates
    if recomputes is not None and policy.generation is not None and policy.generation.backend == "vllm":
        sync = policy.generation.weight_sync
        filled_sync = sync.model_copy(update={"recompute_kv_cache": recomputes})
        _refuse_other_value("policy.generation.weight_sync", sync, filled_sync, name)
        sync.recompute_kv_cache = recomputes


def _refuse_other_value(place: str, own: Section, filled: Section, name: str) -> None:
    """Refuse a key with another value than its default or the value that another section defines."""
    for key, field in type(own).model_fields.items():
        value, given = getattr(own, key), getattr(filled, key)
        if value != given and value != field.get_default(call_default_factory=True):
            full = f"{place}.{key}" if place else key
            raise ConfigError(
                f"{full}={_shown(value)} and {name} disagree: {name} means {key}={_shown(given)}. Set one of the two: "
                f"leave {full} out, or switch {name} off."
            )


def _shown(value: Any) -> str:
    return json.dumps(to_jsonable_python(value)).strip('"')


def _saves_in_background(config: RunConfig) -> bool:
    """Return whether Megatron Core trains a model whose section configures saves in the background."""
    models = (role.section for role in trained(config.models).values())
    return any(model.backend_key == "megatron_cfg" and model.megatron_cfg.checkpoint.async_save for model in models)
