"""Checks that the kinds of workers in `cluster.venvs` are those of the run."""

from collections.abc import Collection

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.utils.did_you_mean import did_you_mean


def check_venvs(cluster: ClusterConfig, kinds: Collection[str]) -> Findings:
    """Check that each name is a kind of worker.

    Args:
        cluster: the section.
        kinds: kinds of workers of the run.
    """
    for name in cluster.venvs:
        if name not in kinds:
            known = ", ".join(sorted(kinds))
            yield f"cluster.venvs.{name}: this run has no such workers; it has: {known}.{did_you_mean(name, kinds)}"
