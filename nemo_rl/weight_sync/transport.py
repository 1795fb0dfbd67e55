"""Move the bytes of a bucket from a trainer rank to an engine, by shared memory, CUDA IPC or collectives.

A transport has two halves in different processes, which share only a picklable spec. With fetching transports (shared
memory, CUDA IPC), the receiver maps memory of the sender. With sending transports (collectives), both sides take part
in the transfer. Invariant: transports move bytes without interpreting them. A fetching sender does not change a buffer
before all engines have loaded the bucket in it.

Shared memory is for trainers and engines on one host. The trainer packs buckets directly into two unnamed memory files,
which every sync reuses, so that pages are allocated only once. Engines map these files through the /proc entry of the
trainer's process. The kernel frees the memory when that process ends for any reason.

CUDA IPC is for engines that use the same GPU as a trainer rank, so that the bytes never leave the GPU. Every trainer
rank packs the bucket on its own GPU and publishes an IPC handle under that GPU's uuid, and the engine on this GPU opens
the handle. A buffer is exported once and its mapping is kept, because torch allocates data for each export and frees
this data only with the buffer.

Collectives (NCCL or gloo) are for engines on other devices or hosts. A trainer rank broadcasts to workers of engines
over a private process group, which does not affect the default groups of either side. Invariant: the trainer rank is
rank 0 of the group, and the workers have ranks from 1 on, in the order of `receivers`. A member whose broadcast fails
leaves the group immediately, so that no member waits for a process that has ended.
"""

import itertools
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from nemo_rl.distributed.ranks.process_group import choose_interface, open_store
from nemo_rl.host.device import allocator_settings
from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.buckets import Bucket

TransportName = Literal["shared_memory", "cuda_ipc", "collective"]


@dataclass(frozen=True)
class TransportSpec:
    """Settings that both halves of a transport share. The controller makes them."""

    name: TransportName
    """The kind of transport."""
    run_id: str
    """Unique id of the run, in the names of stores."""
    device: str = "cpu"
    """Device of the buckets, "cpu" or "cuda"."""
    bucket_size_bytes: int = 256 << 20
    """Largest size of a buffer in bytes. A larger tensor gets its own buffer."""
    verify: bool = True
    """Whether to compute and check fingerprints."""
    master_address: str = "127.0.0.1"
    """For collectives: host of the rendezvous store, on which the sending trainer rank runs."""
    master_port: int = 0
    """For collectives: port of the store."""
    receivers: tuple[int, ...] = ()
    """For collectives: numbers of the receiving workers among the workers of all engines."""
    timeout_s: float = 600.0
    """For collectives: time limit of an operation in seconds."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further options of the transport."""

    @property
    def world_size(self) -> int:
        """Number of processes of a collective."""
        return 1 + len(self.receivers)


class SenderTransport(Protocol):
    """Interface of a transport's half in a trainer rank."""

    needs_send: bool
    """Whether `send` must run while the receivers receive."""

    def buffer(self, num_bytes: int, index: int) -> torch.Tensor:
        """Return a uint8 buffer of at least `num_bytes` for bucket `index`, which bucket `index + 2` reuses."""

    def publish(self, bucket: Bucket) -> None:
        """Add to the bucket the handle by which receivers on this node or device open the packed buffer."""

    def send(self, bucket: Bucket) -> None:
        """Send the packed buffer (sending transports only)."""

    def close(self) -> None:
        """Free buffers, files and groups."""


class ReceiverTransport(Protocol):
    """Interface of a transport's half in a worker of an engine."""

    def receive(self, bucket: Bucket) -> torch.Tensor:
        """Return the bucket's bytes as a uint8 tensor. They are valid until bucket `index + 2` is received."""

    def close(self) -> None:
        """Free mappings and groups."""


_NUM_BUFFERS = 2
_SERIALS = itertools.count()


class MemoryHandle(NamedTuple):
    """Description by which another process of the host opens a buffer."""

    path: str
    """Path of the memory file."""
    serial: int
    """Number that distinguishes buffers with the same path at different times."""
    num_bytes: int
    """Size of the buffer in bytes."""


@dataclass(frozen=True)
class SharedBuffer:
    """Memory that other processes of the host can map."""

    handle: MemoryHandle
    """Description of the memory for other processes."""
    flat: torch.Tensor
    """`[num_bytes]` uint8 tensor of the mapped memory."""
    close: Callable[[], None]
    """Function that frees the memory. Existing mappings stay valid."""


def allocate(num_bytes: int) -> SharedBuffer:
    """Allocate shared memory of at least `num_bytes`.

    On Linux it has no name, and only the machine's memory limits it. On other systems it is a temporary file.
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
        OSError: the buffer does not exist, may not be opened, or has another size.
    """
    size = os.path.getsize(handle.path)
    if size != handle.num_bytes:
        raise OSError(f"{handle.path} has {size} bytes instead of {handle.num_bytes}.")
    try:
        return torch.from_file(handle.path, shared=True, size=handle.num_bytes, dtype=torch.uint8)
    except RuntimeError as refusal:
        raise OSError(str(refusal)) from refusal


class SharedMemorySender:
    """The trainer's half of shared memory. One rank per node uses it (`WeightSender`)."""

    needs_send = False

    def __init__(self, spec: TransportSpec):
        self._spec = spec
        self._buffers: dict[int, SharedBuffer] = {}

    def buffer(self, num_bytes: int, index: int) -> torch.Tensor:
        """Return the buffer. A larger one is new memory, so that mappings of the old one stay valid."""
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
        """Do nothing, because receivers map the memory."""

    def close(self) -> None:
        """Free the memory."""
        for held in self._buffers.values():
            held.close()
        self._buffers.clear()


class SharedMemoryReceiver:
    """The engine's half of shared memory. It maps the sender's buffers, and keeps each mapping for later syncs."""

    def __init__(self, spec: TransportSpec):
        self._spec = spec
        self._mappings: dict[int, tuple[MemoryHandle, torch.Tensor]] = {}

    def receive(self, bucket: Bucket) -> torch.Tensor:
        """Receive a bucket of weights (`ReceiverTransport.receive`).

        Raises:
            WeightSyncError: the sender has no memory on this host, or this process cannot open it.
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


_DEVICE_ARGUMENT = 6
_EXPANDABLE = "expandable_segments:True"


class IpcHandle(NamedTuple):
    """Description by which another process opens a buffer."""

    serial: int
    """Number that distinguishes the sender's buffers."""
    arguments: tuple[Any, ...]
    """Arguments of `rebuild_cuda_tensor`."""


@dataclass(frozen=True)
class _ExportedBuffer:
    flat: torch.Tensor
    handle: IpcHandle


def device_uuid(index: int = 0) -> str:
    """Return the uuid of a visible GPU. It is the same in every process that sees the GPU."""
    return str(torch.cuda.get_device_properties(index).uuid)


class CudaIpcSender:
    """The trainer's half of CUDA IPC. Every rank uses it."""

    needs_send = False

    def __init__(self, spec: TransportSpec):
        self._spec = spec
        self._buffers: dict[int, _ExportedBuffer] = {}

    def buffer(self, num_bytes: int, index: int) -> torch.Tensor:
        """Return the buffer for a bucket, which is on this rank's GPU (`SenderTransport.buffer`)."""
        slot = index % _NUM_BUFFERS
        held = self._buffers.get(slot)
        if held is None or held.flat.numel() < num_bytes:
            with _plain_segments():
                flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._spec.device)
            held = self._buffers[slot] = _ExportedBuffer(flat, IpcHandle(next(_SERIALS), reduce_tensor(flat)[1]))
        return held.flat[:num_bytes]

    def publish(self, bucket: Bucket) -> None:
        """Add the IPC handle under this GPU's uuid, after the packing kernels have finished."""
        torch.cuda.synchronize()
        handle = self._buffers[bucket.index % _NUM_BUFFERS].handle
        bucket.handles[device_uuid(torch.cuda.current_device())] = handle

    def send(self, bucket: Bucket) -> None:
        """Do nothing, because the engine maps the buffer."""

    def close(self) -> None:
        """Free the buffers."""
        self._buffers.clear()


class CudaIpcReceiver:
    """The engine's half of CUDA IPC. It maps the sender's buffers, and keeps each mapping for later syncs."""

    def __init__(self, spec: TransportSpec):
        self._spec = spec
        self._mappings: dict[int, tuple[int, torch.Tensor]] = {}

    def receive(self, bucket: Bucket) -> torch.Tensor:
        """Receive a bucket of weights (`ReceiverTransport.receive`).

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
            held = None  # close the mapping before the next one is opened
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
    """Run a block in which memory is allocated with cudaMalloc instead of expandable segments.

    Expandable segments are shared by file descriptors, which containers often do not allow. The allocator replaces all
    of its settings at once, so the other settings of the environment are passed again.
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


# # All members are called at the same time, so a member that has not joined within a minute will not join.
JOIN_TIMEOUT_S = 60.0
BROADCAST_TIMEOUT_S = 60.0
"""Time limit of a broadcast on GPUs in seconds, in addition to the time for its bytes. It is needed because an NCCL
kernel that waits for a dead process does not report an error."""
LEAST_BYTES_PER_S = 20e6
"""Lowest expected speed of a network between GPUs."""
_ASYNC_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class GroupMember:
    """Membership of one process in the private process group of a collective.

    Args:
        spec: address of the store, number of members, and time limit of an operation. On GPUs, a shorter limit may
            apply (`BROADCAST_TIMEOUT_S`).
        rank: this member's rank in the group; rank 0 hosts the store.

    Raises:
        RuntimeError: not all members joined in time.
    """

    def __init__(self, spec: TransportSpec, rank: int):
        self._timeout = timedelta(seconds=spec.timeout_s)
        self._on_gpu = spec.device == "cuda"
        self._group: Any = _join(spec, rank)

    def broadcast(self, flat: torch.Tensor) -> None:
        """Broadcast a uint8 buffer from rank 0, and wait for it.

        Raises:
            WeightSyncError: another member left or did not take part in time. This member then leaves the group too.
        """
        if self._group is None:
            raise WeightSyncError("This process has left the group of the weight sync.")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = limit = self._limit(flat.numel())
        try:
            # The work is bound to no name, because the traceback of an error would keep the group's connections open.
            self._group.broadcast([flat], options).wait(limit)
        except RuntimeError as error:
            self._group.abort()  # cancel work that waits for a dead process
            self.leave()
            raise WeightSyncError(f"The broadcast of weights failed: {error}") from error
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()

    def _limit(self, num_bytes: int) -> timedelta:
        """Return the time limit of a broadcast. It may be long with gloo, which reports a dead process itself."""
        if not self._on_gpu:
            return self._timeout
        return min(self._timeout, timedelta(seconds=BROADCAST_TIMEOUT_S + num_bytes / LEAST_BYTES_PER_S))

    def leave(self) -> None:
        """Close this member's connections, and free the GPU memory of an NCCL communicator at once."""
        if self._group is not None and self._on_gpu:
            self._group.abort()  # each broadcast has ended, so no work is lost
        self._group = None


def _join(spec: TransportSpec, rank: int) -> Any:
    """Join the other members through the store. Return a gloo or NCCL process group for `broadcast`."""
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
    """Run a block that makes an NCCL group whose failed broadcasts are reported only to the caller.

    By default (3), the watchdog thread of a group ends the whole process, so the end of an engine would end the trainer
    too. A group reads the variable when it is constructed, so other groups are not affected. The watchdog still informs
    the default group of the process; `process_group.outlive_failed_groups` prevents a reaction to this.
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
    """The trainer's half of a collective. The sending rank of a lane uses it."""

    needs_send = True

    def __init__(self, spec: TransportSpec):
        self._spec = spec
        self._member = GroupMember(spec, rank=0)
        self._buffers: dict[int, torch.Tensor] = {}

    def buffer(self, num_bytes: int, index: int) -> torch.Tensor:
        """Return the buffer for a bucket (`SenderTransport.buffer`)."""
        held = self._buffers.get(index % 2)
        if held is None or held.numel() < num_bytes:
            held = torch.empty(num_bytes, dtype=torch.uint8, device=self._spec.device)
            self._buffers[index % 2] = held
        return held[:num_bytes]

    def publish(self, bucket: Bucket) -> None:
        """Do nothing, because `send` sends the bytes."""

    def send(self, bucket: Bucket) -> None:
        """Broadcast the packed buffer to all receivers."""
        self._member.broadcast(self._buffers[bucket.index % 2][: bucket.num_bytes])

    def close(self) -> None:
        """Leave the group."""
        self._buffers.clear()
        self._member.leave()


class CollectiveReceiver:
    """The engine's half of a collective."""

    def __init__(self, spec: TransportSpec, rank: int):
        self._spec = spec
        self._member = GroupMember(spec, rank)

    def receive(self, bucket: Bucket) -> torch.Tensor:
        """Receive a bucket, after waiting until the trainer sends (`ReceiverTransport.receive`)."""
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._spec.device)
        self._member.broadcast(flat)
        return flat

    def close(self) -> None:
        """Leave the group."""
        self._member.leave()
