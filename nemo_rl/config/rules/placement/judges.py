"""The devices of models that reward answers, which policy and engines do not have.

Invariant: on GPUs each device belongs to one of these models or to the models of the run; on CPUs their processes are
additional.
"""

from collections.abc import Mapping

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.rules.placement.topology import without_devices
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.judge_engine import JudgeEngineConfig
from nemo_rl.config.schema.judges import RewardModelEnvironmentConfig

type Judges = Mapping[str, RewardModelEnvironmentConfig | JudgeEngineConfig]
"""Sections of models with devices of their own that reward answers, by their place in the configuration."""


def left_by_judges(cluster: ClusterConfig, judges: Judges) -> ClusterConfig:
    """Return the part of a cluster that judges leave to the models of the run; all of it if their devices are wrong."""
    if any(check_judges(judges, cluster)):
        return cluster
    for judge in judges.values():
        cluster = without_devices(cluster, judge.resources)
    return cluster


def check_judges(judges: Judges, cluster: ClusterConfig) -> Findings:
    """Check that the judges that data names may be used, and that the cluster has devices for them.

    Args:
        judges: their sections.
        cluster: the machines.
    """
    for place, judge in judges.items():
        if isinstance(judge, RewardModelEnvironmentConfig) and not judge.enabled:
            yield f"{place}.enabled=false, but data names the environment reward_model. Set it to true."
        if cluster.rollout_runners:
            what = "a reward model" if isinstance(judge, RewardModelEnvironmentConfig) else "engines"
            yield (
                f"cluster.rollout_runners={cluster.rollout_runners}: each runner would start {what} of its own. "
                f"With {place} use cluster.rollout_runners=0."
            )
    if cluster.uses_gpu and judges:
        yield from _check_gpus(judges, cluster)


def _check_gpus(judges: Judges, cluster: ClusterConfig) -> Findings:
    """Check that all judges together leave devices for the policy."""
    key = "gpus_per_node" if cluster.num_nodes == 1 else "num_nodes"
    has = getattr(cluster, key)
    asked = {f"{place}.resources.{key}": getattr(judge.resources, key) for place, judge in judges.items()}
    for name in (name for name, number in asked.items() if number is None):
        yield f"{name} is not set: how many of the cluster's devices this judge has."
    if sum(number or 0 for number in asked.values()) >= has:
        given = " and ".join(f"{name}={number}" for name, number in asked.items() if number is not None)
        verb = "leaves" if len(asked) == 1 else "leave"
        yield f"{given} {verb} no device for the policy: cluster.{key}={has}. Lower it, or use more devices."
