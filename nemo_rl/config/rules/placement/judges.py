"""The devices of a reward model that rewards answers, which policy and engines do not have.

Invariant: on GPUs each device belongs to the reward model or to the models of the run; on CPUs its processes are
additional.
"""

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.rules.placement.topology import without_devices
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.judges import RewardModelEnvironmentConfig

_KEY = "env.reward_model"


def left_by_judge(cluster: ClusterConfig, judge: RewardModelEnvironmentConfig | None) -> ClusterConfig:
    """Return the part of a cluster that a reward model leaves to the models of the run; all of it if that is none."""
    if judge is None or any(check_judge(judge, cluster)):
        return cluster
    return without_devices(cluster, judge.resources)


def check_judge(judge: RewardModelEnvironmentConfig, cluster: ClusterConfig) -> Findings:
    """Check that the reward model that data names may be used, and that the cluster has devices for it.

    Args:
        judge: its section.
        cluster: the machines.
    """
    if not judge.enabled:
        yield f"{_KEY}.enabled=false, but data names the environment reward_model. Set it to true."
    if cluster.rollout_runners:
        yield (
            f"cluster.rollout_runners={cluster.rollout_runners}: each runner would start a reward model of its own. "
            f"With {_KEY} use cluster.rollout_runners=0."
        )
    if not cluster.uses_gpu:
        return
    key = "gpus_per_node" if cluster.num_nodes == 1 else "num_nodes"
    asked, has = getattr(judge.resources, key), getattr(cluster, key)
    if asked is None:
        yield f"{_KEY}.resources.{key} is not set: how many of the cluster's devices the reward model has."
    elif asked >= has:
        yield (
            f"{_KEY}.resources.{key}={asked} leaves no device for the policy: cluster.{key}={has}. Lower it, or use "
            "more devices."
        )
