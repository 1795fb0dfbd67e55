"""Check, without importing torch, that this machine has the GPUs that `cluster` describes.

The check runs before Ray starts. Nothing is checked if `RAY_ADDRESS` is set, because a cluster may have GPUs that this
machine lacks.
"""

import os
import shutil
import subprocess
from pathlib import Path

from nemo_rl.config.rules.topology import plan_topology
from nemo_rl.config.runs.run import RunConfig
from nemo_rl.utils.addresses import cluster_address
from nemo_rl.utils.errors import ConfigError

_DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")


def check_device(config: RunConfig, gpu_count: int) -> None:
    """Refuse a configuration that needs GPUs that this machine does not have.

    Args:
        config: the run's configuration.
        gpu_count: number of GPUs that are visible to this process.

    Raises:
        ConfigError: `cluster.num_nodes` is above 1 without a cluster, or `cluster.device` is cuda and there are too few
            GPUs. The message names the CPU configuration.
    """
    cluster = config.cluster
    if cluster_address():
        return
    if cluster.num_nodes > 1:
        raise ConfigError(
            f"cluster.num_nodes={cluster.num_nodes}, but without RAY_ADDRESS a run has this machine only. Start Ray on "
            "each machine (docs/machines/cluster.md) and set RAY_ADDRESS, or set cluster.num_nodes=1."
        )
    if not cluster.uses_gpu or not (config.models or config.policy.generation):
        return  # the model is at an endpoint, so the run needs no GPU
    if gpu_count == 0:
        raise ConfigError(
            f"cluster.device={cluster.device}, but this machine has no GPU. To run on the CPU use "
            f"--config {config.cpu_config}; to use a Ray cluster that has GPUs set RAY_ADDRESS."
        )
    topology = plan_topology(cluster, config.policy)
    needed = max(cluster.gpus_per_node, topology.policy_ranks_per_node)
    if needed > gpu_count:
        raise ConfigError(
            f"cluster.gpus_per_node={cluster.gpus_per_node} and {topology.policy_ranks_per_node} policy "
            f"ranks need {needed} GPUs, but this machine shows {gpu_count}. "
            f"Set cluster.gpus_per_node={gpu_count}."
        )


def count_gpus() -> int:
    """Count the GPUs visible to this process, by CUDA_VISIBLE_DEVICES, the driver's files or nvidia-smi."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = None if visible is None else [v for v in visible.split(",") if v.strip()]
    if listed is not None and (not listed or listed[0].strip() == "-1"):
        return 0
    present = len(list(_DRIVER_GPUS.iterdir())) if _DRIVER_GPUS.is_dir() else _count_with_tool()
    return present if listed is None else min(present, len(listed))


def _count_with_tool() -> int:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=3, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
