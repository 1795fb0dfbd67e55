"""Rules on environments that run agent programs, and on the endpoint that these programs call."""

from collections.abc import Mapping
from typing import Any

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.agents import AgentKeys
from nemo_rl.config.schema.algorithms.grpo import GRPOConfig
from nemo_rl.config.schema.cluster import ClusterConfig


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
