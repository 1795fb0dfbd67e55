"""Rules on environments that run agent programs, and on the endpoint that these programs call."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from nemo_rl.config.base.section import Section
from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.agents import AgentKeys
from nemo_rl.config.schema.algorithms.grpo import GRPOConfig
from nemo_rl.config.schema.cluster import ClusterConfig


def unused_environments(
    environments: Mapping[str, Any], used: Collection[str | None], deciders: Sequence[str]
) -> Iterator[tuple[str, Sequence[str], str]]:
    """Yield the sections of environments that no data names, and the endpoint that no program of the run calls.

    Args:
        environments: the section `env`.
        used: names in data entries.
        deciders: keys that name them.
    """
    for name in environments:
        if name not in used:
            yield f"env.{name}", deciders, "no data entry has it as env_name"
    own = [name for name in used if name and not isinstance(environments.get(name), Section)]
    if not own and not any(isinstance(environments.get(name or ""), AgentKeys) for name in used):
        yield "cluster.agent_endpoint", deciders, "no environment of the data runs agents"


def check_agents(environments: Mapping[str, Any], grpo: GRPOConfig, cluster: ClusterConfig) -> Findings:
    """Check that a reward reaches turns that are trained, and that each runner can have an endpoint."""
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
