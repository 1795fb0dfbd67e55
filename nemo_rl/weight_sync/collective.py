"""Send weights by broadcast over a process group of trainer rank 0 and all engines (NCCL or gloo).

It is used if engines run on other devices or hosts than the trainers. The group is private: it does not affect the
default groups of either side. Invariant: trainer rank 0 is rank 0 of the group, and rank i of the engines' workers is
i + 1. A member whose broadcast fails leaves immediately, so that a peer's death ends every member's wait.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl.distributed.ranks.process_group import choose_interface, open_store
from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.transport import TransportSpec

# All members are called at the same time, so one that has not joined within a minute will not come.
JOIN_TIMEOUT_S = 60.0
BROADCAST_TIMEOUT_S = 60.0
"""An NCCL kernel that waits for a dead peer reports no error, so a broadcast on GPUs ends after this and its bytes."""
LEAST_BYTES_PER_S = 20e6
"""A slower network than this is not expected between GPUs."""
_ASYNC_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class GroupMember:
    """Membership of one process in the private group.

    Args:
        spec: address of the store, number of members, and time limit of one operation, which is shorter on GPUs.
        rank: this member's number; rank 0 hosts the store.

    Raises:
        RuntimeError: not all members joined in time.
    """

    def __init__(self, spec: TransportSpec, rank: int):
        self._timeout = timedelta(seconds=spec.timeout_s)
        self._on_gpu = spec.device == "cuda"
        self._group: Any = _join(spec, rank)

    def broadcast(self, flat: torch.Tensor) -> None:
        """Broadcast a uint8 buffer from rank 0 and wait for it.

        Raises:
            WeightSyncError: a peer has left or did not take part in time; this member has now left too.
        """
        if self._group is None:
            raise WeightSyncError("This process has left the group of the weight sync.")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = limit = self._limit(flat.numel())
        try:
            # Do not bind the work to a name: the traceback of a failure would keep the group and its connections open.
            self._group.broadcast([flat], options).wait(limit)
        except RuntimeError as error:
            self._group.abort()  # cancel running work of a dead peer
            self.leave()
            raise WeightSyncError(f"The broadcast of weights failed: {error}") from error
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()

    def _limit(self, num_bytes: int) -> timedelta:
        """Return how long a broadcast may take; gloo notices a dead peer by itself."""
        if not self._on_gpu:
            return self._timeout
        return min(self._timeout, timedelta(seconds=BROADCAST_TIMEOUT_S + num_bytes / LEAST_BYTES_PER_S))

    def leave(self) -> None:
        """Close this member's connections; an NCCL communicator frees its GPU memory here, not when it is collected."""
        if self._group is not None and self._on_gpu:
            self._group.abort()  # all broadcasts have been waited for, so that no work is lost
        self._group = None


def _join(spec: TransportSpec, rank: int) -> Any:
    """Join the other members at the spec's address; return a backend with `broadcast`: gloo on CPU, NCCL on CUDA."""
    timeout = timedelta(seconds=min(spec.timeout_s, JOIN_TIMEOUT_S))
    store = open_store(spec.master_address, spec.master_port, rank, spec.world_size, timeout)
    named = dist.PrefixStore(f"nemo_rl-{spec.run_id}-{spec.extra.get('epoch', 0)}", store)
    if spec.device == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timedelta(seconds=spec.timeout_s)
        with _errors_stay_errors():
            return dist.ProcessGroupNCCL(named, rank, spec.world_size, nccl)
    choose_interface(spec.master_address)
    return dist.ProcessGroupGloo(named, rank, spec.world_size, timeout)


@contextmanager
def _errors_stay_errors() -> Iterator[None]:
    """Make an NCCL group that only reports a failed broadcast to its caller.

    By default (3) its watchdog thread ends the whole process, so a dead engine would end the trainer too. A group reads
    the variable when it is constructed; other groups are not affected. The watchdog still tells the default group of
    the process, which `process_group.outlive_failed_groups` keeps from acting on it.
    """
    before = os.environ.get(_ASYNC_ERROR_HANDLING)
    os.environ[_ASYNC_ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ASYNC_ERROR_HANDLING]
        else:
            os.environ[_ASYNC_ERROR_HANDLING] = before


class CollectiveSender:
    """Trainer half, used in rank 0 only."""

    needs_send = True

    def __init__(self, spec: TransportSpec):
        self._spec = spec
        self._member = GroupMember(spec, rank=0)
        self._buffers: dict[int, torch.Tensor] = {}

    def buffer(self, num_bytes: int, index: int) -> torch.Tensor:
        """See `SenderTransport.buffer`."""
        held = self._buffers.get(index % 2)
        if held is None or held.numel() < num_bytes:
            held = torch.empty(num_bytes, dtype=torch.uint8, device=self._spec.device)
            self._buffers[index % 2] = held
        return held[:num_bytes]

    def publish(self, bucket: Bucket) -> None:
        """Do nothing: the bytes are sent."""

    def send(self, bucket: Bucket) -> None:
        """Broadcast the packed buffer to all engines."""
        self._member.broadcast(self._buffers[bucket.index % 2][: bucket.num_bytes])

    def close(self) -> None:
        """Leave the group."""
        self._buffers.clear()
        self._member.leave()


class CollectiveReceiver:
    """Generator half."""

    def __init__(self, spec: TransportSpec, rank: int):
        self._spec = spec
        self._member = GroupMember(spec, rank)

    def receive(self, bucket: Bucket) -> torch.Tensor:
        """See `ReceiverTransport.receive`; blocks until trainer rank 0 sends."""
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._spec.device)
        self._member.broadcast(flat)
        return flat

    def close(self) -> None:
        """Leave the group."""
        self._member.leave()
