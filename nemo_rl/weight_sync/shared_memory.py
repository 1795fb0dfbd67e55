"""Share weights through memory that the trainer and the engines of one host both map.

The trainer packs buckets directly into two unnamed memory files that every sync reuses, so pages are allocated only
once; engines map the same files through the /proc entry of the trainer's process. The kernel frees the memory when that
process ends, for whatever reason. Invariant: the sender never rewrites a buffer before the controller has every receipt
for the bucket that used it.
"""

import itertools
import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.transport import TransportSpec

_NUM_BUFFERS = 2
_SERIALS = itertools.count()


class MemoryHandle(NamedTuple):
    """Description with which another process of the host opens a buffer."""

    path: str
    """Path of the memory."""
    serial: int
    """Number that distinguishes buffers that used the same path one after the other."""
    num_bytes: int
    """Size of the buffer."""


@dataclass(frozen=True)
class SharedBuffer:
    """Memory that other processes of the host can map."""

    handle: MemoryHandle
    """Description for other processes."""
    flat: torch.Tensor
    """[num_bytes] uint8."""
    close: Callable[[], None]
    """Frees the memory; existing mappings stay valid."""


def allocate(num_bytes: int) -> SharedBuffer:
    """Allocate shared memory of at least `num_bytes`.

    On Linux it has no name and is limited only by the machine's memory; elsewhere it is a temporary file.
    """
    num_bytes = max(num_bytes, 1)
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("nemo_rl-weights", os.MFD_CLOEXEC)
        path, close = f"/proc/{os.getpid()}/fd/{descriptor}", partial(os.close, descriptor)
        os.ftruncate(descriptor, num_bytes)
    else:
        descriptor, path = tempfile.mkstemp(prefix="nemo_rl-weights-")
        close = partial(os.unlink, path)
        os.ftruncate(descriptor, num_bytes)
        os.close(descriptor)
    handle = MemoryHandle(path, next(_SERIALS), num_bytes)
    return SharedBuffer(handle, map_memory(handle), close)


def map_memory(handle: MemoryHandle) -> torch.Tensor:
    """Map a buffer as a shared uint8 tensor [num_bytes].

    Raises:
        OSError: it does not exist, may not be opened, or has another size.
    """
    size = os.path.getsize(handle.path)
    if size != handle.num_bytes:
        raise OSError(f"{handle.path} has {size} bytes instead of {handle.num_bytes}.")
    try:
        return torch.from_file(handle.path, shared=True, size=handle.num_bytes, dtype=torch.uint8)
    except RuntimeError as refusal:
        raise OSError(str(refusal)) from refusal


class SharedMemorySender:
    """Trainer half; only one rank per node uses it, see `WeightSender`."""

    needs_send = False

    def __init__(self, spec: TransportSpec):
        self._spec = spec
        self._buffers: dict[int, SharedBuffer] = {}

    def buffer(self, num_bytes: int, index: int) -> torch.Tensor:
        """See `SenderTransport.buffer`; grows by allocating new memory, so old mappings stay valid."""
        slot = index % _NUM_BUFFERS
        held = self._buffers.get(slot)
        if held is None or held.flat.numel() < num_bytes:
            if held is not None:
                held.close()
            held = self._buffers[slot] = allocate(num_bytes)
        return held.flat[:num_bytes]

    def publish(self, bucket: Bucket) -> None:
        """Add the memory's handle for receivers on this host."""
        bucket.handles[socket.gethostname()] = self._buffers[bucket.index % _NUM_BUFFERS].handle

    def send(self, bucket: Bucket) -> None:
        """Do nothing: receivers map the memory."""

    def close(self) -> None:
        """Free the memory."""
        for held in self._buffers.values():
            held.close()
        self._buffers.clear()


class SharedMemoryReceiver:
    """Generator half: maps the sender's buffers and keeps each mapping for later syncs."""

    def __init__(self, spec: TransportSpec):
        self._spec = spec
        self._mappings: dict[int, tuple[MemoryHandle, torch.Tensor]] = {}

    def receive(self, bucket: Bucket) -> torch.Tensor:
        """See `ReceiverTransport.receive`.

        Raises:
            WeightSyncError: the sender has no memory on this host, or it cannot be opened from here.
        """
        host = socket.gethostname()
        handle = bucket.handles.get(host)
        if handle is None:
            raise WeightSyncError(
                f"The trainer wrote shared memory on {sorted(bucket.handles)}, but this engine runs "
                f"on {host}. Set policy.generation.weight_sync.transport=collective."
            )
        slot = bucket.index % _NUM_BUFFERS
        held = self._mappings.get(slot)
        if held is None or held[0] != handle:
            held = self._mappings[slot] = (handle, self._map(handle))
        return held[1][: bucket.num_bytes]

    def _map(self, handle: MemoryHandle) -> torch.Tensor:
        try:
            return map_memory(handle)
        except OSError as refusal:
            raise WeightSyncError(
                f"The trainer's shared memory {handle.path} cannot be opened from this engine: its process has "
                "ended, or runs as another user or in another container of the same name. If it still runs, set "
                "policy.generation.weight_sync.transport=collective."
            ) from refusal

    def close(self) -> None:
        """Drop the mappings."""
        self._mappings.clear()
