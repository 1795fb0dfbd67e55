"""Join the `torch.distributed` world that a worker group's environment describes.

Policy workers and weight receivers call it first. Law: rank, world size and address come from the
environment that `worker_groups` sets, backend and timeout from the caller.
"""

import ipaddress
import os
import sys
from datetime import timedelta

import torch.distributed as dist

from nemo_rl.utils.device import Device
from nemo_rl.utils.errors import ConfigError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init_process_group(device: Device, timeout_s: float, local_rank: int = 0) -> None:
    """Create the default process group from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Args:
        device: chooses nccl or gloo.
        timeout_s: seconds after which a collective that a peer never joins raises.
        local_rank: index of this process's GPU among those it sees.

    Raises:
        ConfigError: the environment lacks one of the variables.
    """
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise ConfigError(
            f"torch.distributed needs the environment variables {missing}; "
            "a RayWorkerGroup sets them, or start the process with torchrun."
        )
    if not device.is_gpu and _is_loopback(os.environ["MASTER_ADDR"]):
        # gloo would look up the host name, which may resolve to an address no peer can reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group(
        device.collective_backend,
        timeout=timedelta(seconds=timeout_s),
        device_id=device.torch_device(local_rank) if device.is_gpu else None,
    )


def destroy_process_group() -> None:
    """Leave the default process group; nothing to do when there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
