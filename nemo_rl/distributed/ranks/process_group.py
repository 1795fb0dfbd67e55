"""Join the `torch.distributed` process group that a worker's environment variables describe.

Invariant: `worker_groups` sets the variables for rank, world size and address. The caller chooses the backend and the
timeout. Rank 0 listens on the port that its process reserved with `rendezvous.hold_port`.
"""

import fcntl
import ipaddress
import os
import socket
import struct
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nemo_rl.distributed.parallel_layout import AXES, ParallelLayout
from nemo_rl.distributed.ranks.rendezvous import take_port
from nemo_rl.host.device import Device
from nemo_rl.utils.errors import ConfigError

_SIOCGIFADDR = 0x8915
"""Linux ioctl that returns the IPv4 address of an interface."""
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_DUMP_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"


def init_process_group(device: Device, timeout_s: float, local_rank: int = 0, *, binds_device: bool = True) -> None:
    """Create the default process group from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Args:
        device: chooses nccl or gloo.
        timeout_s: seconds after which a collective raises an error if a peer does not join.
        local_rank: index of this process's GPU among its visible GPUs.
        binds_device: connect to all ranks immediately (NCCL with a device id), so that groups of a mesh are split from
            this group. Otherwise groups connect at their first use, and point-to-point transfers of pairs of ranks do
            not wait for each other. Libraries that make many groups then start faster.

    Raises:
        ConfigError: the environment lacks one of the variables.
    """
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise ConfigError(
            f"torch.distributed needs the environment variables {missing}; "
            "a RayWorkerGroup sets them, or start the process with torchrun."
        )
    choose_interface(os.environ["MASTER_ADDR"])
    outlive_failed_groups()
    rank, world_size, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=timeout_s)
    dist.init_process_group(
        device.collective_backend,
        store=open_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, world_size, timeout),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device.torch_device(local_rank) if device.is_gpu and binds_device else None,
    )


def outlive_failed_groups() -> None:
    """Keep this process alive after a failed collective of an NCCL group other than its default group.

    The watchdog of a group records a failure in a flag of the process. If torch dumps on a timeout, as it does by
    default, the monitor of the default group reads that flag and ends the process after
    `TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC` (8 minutes), although the group of a weight sync has reported the failure and no
    longer exists. torch reads the variable when it makes the default group, so this function must be called before
    that. A value set by the user is kept.
    """
    os.environ.setdefault(_DUMP_ON_TIMEOUT, "0")


def choose_interface(address: str) -> None:
    """Choose the network interface to the group's store for gloo, unless GLOO_SOCKET_IFNAME is set.

    Otherwise gloo uses the address of the host name, which peers may not be able to reach (127.0.1.1 on Debian).
    """
    name = _interface_to(address)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def open_store(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.TCPStore:
    """Open the store through which a group's members connect. Rank 0 serves it, on the port that it holds if any.

    Raises:
        DistNetworkError: rank 0 does not hold the port and the port is taken, or rank 0 cannot be reached in time.
    """
    listening = take_port(port) if rank == 0 else None
    return dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=listening)


def device_mesh(layout: ParallelLayout, device_type: str) -> DeviceMesh:
    """Build a mesh of the default group's ranks with the axes of `parallel_layout`. The call is collective.

    Raises:
        ConfigError: the group has another number of ranks than the layout.
    """
    if layout.num_ranks != dist.get_world_size():
        raise ConfigError(
            f"the parallel layout {dict(zip(AXES, layout.shape, strict=True))} has {layout.num_ranks} ranks, the "
            f"process group {dist.get_world_size()}."
        )
    return init_device_mesh(device_type, layout.shape, mesh_dim_names=AXES)


def collective_timeout(device: torch.device) -> timedelta:
    """Return the timeout of the default group's collectives. Groups of a mesh have torch's default timeout."""
    world: Any = dist.group.WORLD
    limit: timedelta = world._get_backend(device).options._timeout
    return limit


def destroy_process_group() -> None:
    """Leave the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def address_towards(address: str) -> str | None:
    """Return this machine's address on the route to an address, or None if the system does not report it."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except OSError:
            return None
        own: str = probe.getsockname()[0]
    return own


def _interface_to(address: str) -> str | None:
    """Return the name of the interface for packets to an address, or None if it is unknown."""
    if _is_loopback(address):
        return "lo0" if sys.platform == "darwin" else "lo"
    towards = address_towards(address)
    if towards is None or ":" in towards:
        return None
    own = socket.inet_aton(towards)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no address
                if fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24] == own:
                    return name
    return None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
