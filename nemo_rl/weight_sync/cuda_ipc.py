"""Share weights through CUDA IPC: engine and trainer rank use the same GPU, so the bytes never leave it.

Every trainer rank packs the bucket on its own GPU and publishes an IPC handle under that GPU's uuid; the
engine on the same GPU opens it. A buffer is exported once and its mapping is kept, as in `shared_memory`: torch makes
new bookkeeping for a storage with each export and frees it only with the storage. Invariant: the sender holds the
buffer until it has all receipts.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from nemo_rl.host.device import allocator_settings
from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.transport import TransportSpec

_NUM_BUFFERS = 2
_DEVICE_ARGUMENT = 6
_SERIALS = itertools.count()
_EXPANDABLE = "expandable_segments:True"


class IpcHandle(NamedTuple):
    """Description with which another process opens a buffer."""

    serial: int
    """Number that distinguishes the sender's buffers."""
    arguments: tuple[Any, ...]
    """Arguments of `rebuild_cuda_tensor`."""


@dataclass(frozen=True)
class _ExportedBuffer:
    flat: torch.Tensor
    handle: IpcHandle


def device_uuid(index: int = 0) -> str:
    """Return the physical identity of a visible GPU, equal in every process that sees it."""
    return str(torch.cuda.get_device_properties(index).uuid)


class CudaIpcSender:
    """Trainer half, used in every rank."""

    needs_send = False

    def __init__(self, spec: TransportSpec):
        self._spec = spec
        self._buffers: dict[int, _ExportedBuffer] = {}

    def buffer(self, num_bytes: int, index: int) -> torch.Tensor:
        """See `SenderTransport.buffer`; on this rank's GPU."""
        slot = index % _NUM_BUFFERS
        held = self._buffers.get(slot)
        if held is None or held.flat.numel() < num_bytes:
            with _plain_segments():
                flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._spec.device)
            held = self._buffers[slot] = _ExportedBuffer(flat, IpcHandle(next(_SERIALS), reduce_tensor(flat)[1]))
        return held.flat[:num_bytes]

    def publish(self, bucket: Bucket) -> None:
        """Publish the IPC handle under this GPU's uuid, after the packing kernels have finished."""
        torch.cuda.synchronize()
        handle = self._buffers[bucket.index % _NUM_BUFFERS].handle
        bucket.handles[device_uuid(torch.cuda.current_device())] = handle

    def send(self, bucket: Bucket) -> None:
        """Do nothing: the engine maps the buffer."""

    def close(self) -> None:
        """Free the buffers."""
        self._buffers.clear()


class CudaIpcReceiver:
    """Generator half: maps the sender's buffers and keeps each mapping for later syncs."""

    def __init__(self, spec: TransportSpec):
        self._spec = spec
        self._mappings: dict[int, tuple[int, torch.Tensor]] = {}

    def receive(self, bucket: Bucket) -> torch.Tensor:
        """See `ReceiverTransport.receive`.

        Raises:
            WeightSyncError: no trainer rank runs on this engine's GPU, or its memory cannot be opened.
        """
        uuid = device_uuid(torch.cuda.current_device())
        handle: IpcHandle | None = bucket.handles.get(uuid)
        if handle is None:
            raise WeightSyncError(
                f"No trainer rank shares GPU {uuid} with this engine (trainers are on "
                f"{sorted(bucket.handles)}). Set policy.generation.weight_sync.transport=collective."
            )
        slot = bucket.index % _NUM_BUFFERS
        held = self._mappings.pop(slot, None)
        if held is None or held[0] != handle.serial:
            held = None  # close the mapping of a freed buffer before the next one is opened
            held = (handle.serial, _map(handle))
        self._mappings[slot] = held
        return held[1][: bucket.num_bytes]

    def close(self) -> None:
        """Close the mappings."""
        self._mappings.clear()


def _map(handle: IpcHandle) -> torch.Tensor:
    arguments = list(handle.arguments)
    arguments[_DEVICE_ARGUMENT] = torch.cuda.current_device()
    try:
        return rebuild_cuda_tensor(*arguments)
    except RuntimeError as refusal:
        raise WeightSyncError(
            f"The trainer's GPU memory cannot be opened from this engine: {refusal}. CUDA IPC needs both processes in "
            "one container, or containers with --ipc=host. Else set policy.generation.weight_sync.transport=collective."
        ) from refusal


@contextmanager
def _plain_segments() -> Iterator[None]:
    """Allocate with cudaMalloc: expandable segments are shared by file descriptor, which containers often refuse.

    The allocator reads its settings as a whole, so the environment's other settings are passed again.
    """
    _, settings = allocator_settings()
    if _EXPANDABLE not in settings:
        yield
        return
    apply = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    apply(settings.replace(_EXPANDABLE, "expandable_segments:False"))
    try:
        yield
    finally:
        apply(settings)
