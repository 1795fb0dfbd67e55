"""Rules on sampling and training at the same time."""

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.algorithms.grpo import GRPOConfig
from nemo_rl.config.schema.algorithms.overlap import AsyncRLConfig
from nemo_rl.config.schema.algorithms.rollout_training import RolloutTrainingConfig
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.model.policy import PolicyConfig


def check_overlap(
    section: str, algorithm: RolloutTrainingConfig, policy: PolicyConfig, cluster: ClusterConfig
) -> Findings:
    """Check that the engines can sample while the policy trains, and that a step's groups fit into the buffer.

    Args:
        section: name of the algorithm's section.
        algorithm: the section.
        policy: the section of the policy.
        cluster: the machines.
    """
    overlap = algorithm.overlap
    if overlap.mode == "none":
        return
    if cluster.uses_gpu and policy.generation is not None and policy.generation.colocated.enabled:
        yield (
            f"{section}.overlap.mode={overlap.mode} samples while the policy trains, but with "
            "policy.generation.colocated.enabled=true engines and policy take turns on the same GPUs. Give the engines "
            "GPUs of their own: policy.generation.colocated.enabled=false, with their number in "
            "policy.generation.colocated.resources."
        )
    factor = algorithm.batch_multiplier if isinstance(algorithm, GRPOConfig) and algorithm.use_dynamic_sampling else 1
    needed = int(algorithm.num_prompts_per_step * factor)
    if overlap.max_buffered_groups is not None and overlap.max_buffered_groups < needed:
        yield (
            f"{section}.overlap.max_buffered_groups={overlap.max_buffered_groups} (async_rl.max_buffered_rollouts) is "
            f"less than the {needed} groups that are sampled for a step, so no step could begin. Use {needed} or more."
        )


def check_one_overlap(grpo: GRPOConfig, async_rl: AsyncRLConfig | None) -> Findings:
    """Only one of NeMo RL's two sections describes the overlap."""
    if async_rl is not None and grpo.async_grpo is not None and grpo.async_grpo.enabled:
        yield (
            "async_rl and grpo.async_grpo.enabled=true both describe how sampling and training overlap. Keep one: "
            "async_rl=null, or grpo.async_grpo.enabled=false."
        )
