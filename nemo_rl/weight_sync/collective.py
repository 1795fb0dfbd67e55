"""Weights by broadcast over a process group of trainer rank 0 and all engines (NCCL or gloo).

Used when engines sit on other devices or hosts than the trainers. The group is private: it does not
touch the default groups of either side. Law: trainer rank 0 is rank 0 of the group, engine i is i + 1.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.interfaces import TransportSpec


def join_group(spec: TransportSpec, rank: int) -> Any:
    """Meet the other members at the spec's address and form the group.

    Returns:
        A backend object with `broadcast`: gloo on CPU, NCCL on CUDA.
    """
    timeout = timedelta(seconds=spec.timeout_s)
    store = dist.TCPStore(spec.master_address, spec.master_port, spec.world_size, is_master=rank == 0, timeout=timeout)
    named = dist.PrefixStore(f"nemo_rl-{spec.run_id}-{spec.extra.get('epoch', 0)}", store)
    if spec.device == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(named, rank, spec.world_size, options)
    if spec.master_address.startswith("127."):
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = timeout
        return dist.ProcessGroupGloo(named, rank, spec.world_size, options)
    return dist.ProcessGroupGloo(named, rank, spec.world_size, timeout)


def broadcast(group: Any, flat: torch.Tensor, timeout_s: float) -> None:
    """Broadcast a uint8 buffer from rank 0 and wait for it."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    group.broadcast([flat], options).wait(timedelta(seconds=timeout_s))
    if flat.is_cuda:
        torch.cuda.current_stream(flat.device).synchronize()


class CollectiveSender:
    """Trainer half, in rank 0 only."""

    needs_send = True

    def __init__(self, spec: TransportSpec):
        self._spec = spec
        self._group: dist.Backend | None = join_group(spec, rank=0)
        self._buffers: dict[int, torch.Tensor] = {}

    def buffer(self, num_bytes: int, index: int) -> torch.Tensor:
        """See `SenderTransport.buffer`."""
        held = self._buffers.get(index % 2)
        if held is None or held.numel() < num_bytes:
            held = torch.empty(num_bytes, dtype=torch.uint8, device=self._spec.device)
            self._buffers[index % 2] = held
        return held[:num_bytes]

    def publish(self, bucket: Bucket) -> None:
        """Nothing to publish: the bytes are sent."""

    def send(self, bucket: Bucket) -> None:
        """Broadcast the packed buffer to all engines."""
        assert self._group is not None, "send after close"
        flat = self._buffers[bucket.index % 2][: bucket.num_bytes]
        broadcast(self._group, flat, self._spec.timeout_s)

    def close(self) -> None:
        """Leave the group."""
        self._buffers.clear()
        self._group = None


class CollectiveReceiver:
    """Generator half."""

    def __init__(self, spec: TransportSpec, rank: int):
        self._spec = spec
        self._group: dist.Backend | None = join_group(spec, rank=rank)

    def receive(self, bucket: Bucket) -> torch.Tensor:
        """See `ReceiverTransport.receive`; blocks until trainer rank 0 sends."""
        assert self._group is not None, "receive after close"
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._spec.device)
        broadcast(self._group, flat, self._spec.timeout_s)
        return flat

    def close(self) -> None:
        """Leave the group."""
        self._group = None
