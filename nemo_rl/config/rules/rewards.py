"""Check everything besides the environment that changes the training reward of an answer.

This includes agents and their endpoint, NeMo Gym, levels of effort, penalties, and PPO's advantages and critic.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from nemo_rl.config.base.names import is_own_class
from nemo_rl.config.base.section import Section
from nemo_rl.config.rules.broken_rules import Findings, nearest_divisors
from nemo_rl.config.schema.agents import NEMO_GYM, AgentKeys, NemoGymConfig
from nemo_rl.config.schema.algorithms.grpo import GRPOConfig
from nemo_rl.config.schema.algorithms.loss_fn import ClippedPGLossConfig
from nemo_rl.config.schema.algorithms.ppo import PPOConfig, ValueConfig
from nemo_rl.config.schema.algorithms.reward_penalties import BUILT_IN, EffortLevelConfig, RewardPenaltyConfig
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.model.generation import GenerationConfig


def unused_environments(
    environments: Mapping[str, Any], used: Collection[str | None], deciders: Sequence[str]
) -> Iterator[tuple[str, Sequence[str], str]]:
    """Yield the sections of environments that the data does not name, and the endpoint if no program calls it.

    Args:
        environments: the section `env`.
        used: names of environments in data entries.
        deciders: keys in which these names are set.
    """
    for name in environments:
        if name not in used:
            yield f"env.{name}", deciders, "no data entry has it as env_name"
    own = [name for name in used if name and not isinstance(environments.get(name), Section)]
    if not own and not any(isinstance(environments.get(name or ""), AgentKeys) for name in used):
        yield "cluster.agent_endpoint", deciders, "no environment of the data runs agents"


def check_agents(environments: Mapping[str, Any], grpo: GRPOConfig, cluster: ClusterConfig) -> Findings:
    """Check that rewards reach trained turns, and that each runner can have an endpoint."""
    credit = grpo.adv_estimator.credit
    for name, section in environments.items():
        if isinstance(section, AgentKeys) and section.credit == "last" and credit != "episode":
            yield (
                f"env.{name}.credit=last trains one conversation of a sample, but grpo.adv_estimator.credit={credit} "
                "gives the reward to turns of all of them. Use grpo.adv_estimator.credit=episode, or "
                f"env.{name}.credit=all."
            )
    endpoint = cluster.agent_endpoint
    if cluster.rollout_runners and (endpoint.port or endpoint.public_host):
        yield (
            f"cluster.agent_endpoint has port={endpoint.port} and public_host={endpoint.public_host}, but each of the "
            f"{cluster.rollout_runners} runners (cluster.rollout_runners) has an endpoint of its own. Leave both out; "
            "host=0.0.0.0 gives each the address of its machine."
        )


def check_step_credit(environments: Mapping[str, Any], used: Collection[str | None], grpo: GRPOConfig) -> Findings:
    """Check that an environment of the data gives rewards of steps, if they get credit.

    Args:
        environments: the section `env`.
        used: names of environments that data has. The user's own environments may give rewards of steps.
    """
    sections = [environments.get(name or "") for name in used]
    gives = any(not isinstance(each, Section) or getattr(each, "step_reward", None) == "each" for each in sections)
    if grpo.adv_estimator.credit == "step_rewards" and not gives:
        yield (
            "grpo.adv_estimator.credit=step_rewards, but no environment of the data gives rewards of steps. Set "
            "env.reward_model.step_reward=each with a process reward model, use an environment of your own, or set "
            "credit=episode."
        )


_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_OF_A_BUDGET = ("over_budget_penalty", "over_budget_tokens")


def check_effort_levels(levels: Mapping[str, EffortLevelConfig], grpo: GRPOConfig) -> Findings:
    """Check that levels differ in their prompts, and that penalties have a budget and an effect."""
    for name, level in levels.items():
        key = f"effort_levels.{name}"
        if not _NAME.fullmatch(name):
            yield f"{key}: a name of a level, which metrics contain, has letters, digits, '_', '.' and '-' only."
        if level.system_prompt is not None and not level.system_prompt.strip():
            yield f"{key}.system_prompt is empty. Give a text, or null."
        changed = [field for field in _OF_A_BUDGET if getattr(level, field) != getattr(EffortLevelConfig(), field)]
        if level.max_thinking_tokens is None and changed:
            yield f"{key}.{changed[0]} has no effect without {key}.max_thinking_tokens. Set it, or remove {changed[0]}."
        if level.max_thinking_tokens is not None and level.over_budget_penalty and grpo.adv_estimator.name == "gdpo":
            yield (
                f"{key}.max_thinking_tokens changes the total reward, but grpo.adv_estimator.name=gdpo computes "
                "advantages from reward components. Set it to null, or use another estimator."
            )
    for (name, level), (other, same) in combinations(levels.items(), 2):
        if (level.system_prompt, level.chat_template_kwargs) == (same.system_prompt, same.chat_template_kwargs):
            yield (
                f"effort_levels.{name} and effort_levels.{other} give the model the same prompt, so it cannot tell "
                "them apart. Give one of them another system_prompt or chat_template_kwargs."
            )


def left_by_gym(cluster: ClusterConfig, environments: Mapping[str, Any]) -> ClusterConfig:
    """Return the cluster without the machines of NeMo Gym's models. Return all of it if there are too few machines."""
    section = environments.get(NEMO_GYM)
    taken = section.num_gpu_nodes if isinstance(section, NemoGymConfig) and cluster.uses_gpu else 0
    if not 0 < taken < cluster.num_nodes:
        return cluster
    return cluster.model_copy(update={"num_nodes": cluster.num_nodes - taken})


def check_nemo_gym(environments: Mapping[str, Any], used: Collection[str | None], cluster: ClusterConfig) -> Findings:
    """Check that NeMo Gym's servers can be started or found, and that they can call the endpoint.

    Args:
        environments: the section `env`.
        used: names of environments that data has.
    """
    section = environments.get(NEMO_GYM)
    if not isinstance(section, NemoGymConfig):
        return
    if NEMO_GYM not in used:
        if section.should_use_nemo_gym:
            yield (
                "env.should_use_nemo_gym=true, but no data has env_name=nemo_gym. Give data env_name=nemo_gym, "
                "dataset_name=NemoGymDataset and processor=nemo_gym_data_processor."
            )
        return
    if cluster.uses_gpu and section.num_gpu_nodes >= cluster.num_nodes:
        yield (
            f"env.nemo_gym.num_gpu_nodes={section.num_gpu_nodes} leaves no machine for the run: cluster.num_nodes="
            f"{cluster.num_nodes}. Lower it, or use more machines."
        )
    if cluster.rollout_runners:
        yield (
            f"cluster.rollout_runners={cluster.rollout_runners} makes an endpoint in each runner, but NeMo Gym's model "
            "server calls one address. Set cluster.rollout_runners=0."
        )
    if section.config_paths:
        return
    if section.head_server is None:
        yield (
            "env.nemo_gym has neither config_paths nor head_server. Name the files of the servers to start in "
            "env.nemo_gym.config_paths, or give the address of servers that run already as env.nemo_gym.head_server."
        )
    elif not cluster.agent_endpoint.port:
        yield (
            "env.nemo_gym.head_server names servers that run already, whose policy_base_url has to be the endpoint of "
            "this run. Set cluster.agent_endpoint.port to the port in it; 0 takes any."
        )


def check_http_server(
    key: str, generation: GenerationConfig | None, environments: Mapping[str, Any], used: Collection[str | None]
) -> Findings:
    """Check that an HTTP server is configured only in a run whose agents call it.

    Args:
        key: dotted key of the section of the engines.
        generation: the section of the engines. None without engines.
        environments: as in `check_nemo_gym`.
        used: as in `check_nemo_gym`.
    """
    has_agents = any(isinstance(environments.get(str(name)), AgentKeys) for name in used)
    if generation is not None and generation.vllm_cfg.expose_http_server and not has_agents:
        yield (
            f"{key}.vllm_cfg.expose_http_server=true, but the engines are only served to programs of agents "
            "(env.agent, env.nemo_gym), and no data names such an environment. Leave it out, or use one."
        )


def check_thinking_tags(key: str, tags: list[str]) -> Findings:
    """Check that there are two texts that can be told apart."""
    if len(tags) != 2 or not all(tag.strip() for tag in tags) or tags[0] == tags[1]:
        yield (
            f"{key}={tags} must be two different texts: the one that opens the thinking and the one that closes it, "
            "for example [<think>, </think>]."
        )
    elif tags[0] in tags[1] or tags[1] in tags[0]:
        yield f"{key}={tags}: one text contains the other, so they cannot be told apart."


def check_reward_penalties(penalties: RewardPenaltyConfig) -> Findings:
    """Check that each penalty has the texts or tokens that it needs, and that the names of penalties are valid."""
    section = "reward_penalties"
    yield from check_thinking_tags(f"{section}.thinking_tags", penalties.thinking_tags)
    ids = penalties.ids
    if penalties.penalize_unwanted_tokens and not ids.unwanted:
        yield (
            f"{section}.penalize_unwanted_tokens=true needs the tokens: set {section}.token_ids.unwanted to a list of "
            "ids, or the switch to false."
        )
    if ids.think_open is not None and ids.think_open == ids.think_close:
        yield (
            f"{section}.token_ids.think_open and think_close are both {ids.think_open}. Give two tokens, or null for "
            f"those of {section}.thinking_tags."
        )
    for name, part in penalties.own.items():
        if name in BUILT_IN or not _NAME.fullmatch(name):
            yield (
                f"{section}.own.{name}: a name has letters, digits, '_', '.' and '-', and is none of the built-in "
                f"penalties ({', '.join(BUILT_IN)})."
            )
        if not is_own_class(part.name):
            yield (
                f"{section}.own.{name}.name={part.name} is no dotted path of a class. Built-in penalties are switched "
                f"on by {section}.penalize_<name>."
            )


def check_ppo(ppo: PPOConfig, loss: ClippedPGLossConfig) -> Findings:
    """Check that the critic can be trained alone at first, and that the loss uses the results of the formula."""
    start, last = ppo.policy_training_start_step, ppo.max_num_steps
    if start >= last:
        yield (
            f"ppo.policy_training_start_step={start} trains only the critic in all of the ppo.max_num_steps={last} "
            f"steps. Set it below {last}."
        )
    if ppo.adv_estimator.name == "raw_reward" and ppo.adv_estimator.bootstrap_truncated:
        yield (
            "ppo.adv_estimator.bootstrap_truncated=true adds a value of the critic to the rewards, but "
            "ppo.adv_estimator.name=raw_reward uses no values. Set it to false, or use name=gae."
        )
    if ppo.overlong_filtering and ppo.adv_estimator.bootstrap_truncated:
        yield (
            "ppo.adv_estimator.bootstrap_truncated=true adds a value of the critic to answers that hit a length limit, "
            "but ppo.overlong_filtering=true leaves them out of the loss. Set one of them to false."
        )
    yield from _check_ratio(ppo, loss)


def _check_ratio(ppo: PPOConfig, loss: ClippedPGLossConfig) -> Findings:
    """Refuse one ratio per sequence for advantages that differ between tokens, because it would average them."""
    has_one_ratio = not (loss.force_on_policy_ratio or loss.disable_ppo_ratio)
    if not loss.sequence_level_importance_ratios or not has_one_ratio:
        return
    estimator, discount = ppo.adv_estimator.name, ppo.adv_estimator.gae_gamma
    differs = {
        "ppo.adv_estimator.name=gae": estimator == "gae",
        f"ppo.adv_estimator.gae_gamma={discount:g}": discount != 1,
        "loss_fn.use_kl_in_reward=true": loss.use_kl_in_reward,
    }
    reason = next((key for key, holds in differs.items() if holds), None)
    if reason is not None:
        yield (
            "loss_fn.sequence_level_importance_ratios=true (GSPO) gives every answer one ratio, so that only the mean "
            f"of its advantages would count, but {reason} gives each token its own. Set "
            "loss_fn.sequence_level_importance_ratios=false, or use ppo.adv_estimator.name=raw_reward, gae_gamma=1 and "
            "use_kl_in_reward=false, where all tokens of an answer have the same."
        )


def check_value(ppo: PPOConfig, value: ValueConfig) -> Findings:
    """Check that the critic's updates divide the samples of a step."""
    prompts, answers = ppo.num_prompts_per_step, ppo.num_generations_per_prompt
    samples, batch = prompts * answers, value.train_global_batch_size
    if samples % batch:
        yield (
            f"ppo.num_prompts_per_step={prompts} x ppo.num_generations_per_prompt={answers} = {samples} samples do not "
            f"divide into value.train_global_batch_size={batch}. Nearest values: {nearest_divisors(batch, samples)}."
        )
