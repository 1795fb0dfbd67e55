"""Rules on the environment of NeMo Gym, and on NeMo RL's keys for the HTTP server that it needs there."""

from collections.abc import Collection, Mapping
from typing import Any

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.agents import NEMO_GYM, AgentKeys, NemoGymConfig
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.model.generation import GenerationConfig


def left_by_gym(cluster: ClusterConfig, environments: Mapping[str, Any]) -> ClusterConfig:
    """Return the machines that models of NeMo Gym's servers leave to the run; all of them if there are too few."""
    section = environments.get(NEMO_GYM)
    taken = section.num_gpu_nodes if isinstance(section, NemoGymConfig) and cluster.uses_gpu else 0
    if not 0 < taken < cluster.num_nodes:
        return cluster
    return cluster.model_copy(update={"num_nodes": cluster.num_nodes - taken})


def check_nemo_gym(environments: Mapping[str, Any], used: Collection[str | None], cluster: ClusterConfig) -> Findings:
    """Check that NeMo Gym's servers can be started or found, and that they know the endpoint.

    Args:
        environments: the section `env`.
        used: names of environments that data has.
        cluster: the machines.
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
    """Check that an HTTP server is only asked for where programs of agents call it.

    Args:
        key: dotted key of the section of the engines.
        generation: this section; None without engines.
        environments: as in `check_nemo_gym`.
        used: as in `check_nemo_gym`.
    """
    has_agents = any(isinstance(environments.get(str(name)), AgentKeys) for name in used)
    if generation is not None and generation.vllm_cfg.expose_http_server and not has_agents:
        yield (
            f"{key}.vllm_cfg.expose_http_server=true, but the engines are only served to programs of agents "
            "(env.agent, env.nemo_gym), and no data names such an environment. Leave it out, or use one."
        )
