"""Transports: move the bytes of a bucket from a trainer rank to an engine, by one of three ways.

Define transports, which move the bytes of a bucket from a trainer rank to a generator. A transport has two halves in
different processes, which share only a picklable spec. Fetching transports (shared memory, CUDA IPC) leave the bytes
where the receiver can map them; sending transports (collectives) move them while both sides take part. Invariant:
transports move bytes and never interpret them.

Share weights through memory that the trainer and the engines of one host both map. The trainer packs buckets directly
into two unnamed memory files that every sync reuses, so pages are allocated only once; engines map the same files
through the /proc entry of the trainer's process. The kernel frees the memory when that process ends, for whatever
reason. Invariant: the sender never rewrites a buffer before the controller has every receipt for the bucket that used
it.

Share weights through CUDA IPC: engine and trainer rank use the same GPU, so the bytes never leave it. Every trainer
rank packs the bucket on its own GPU and publishes an IPC handle under that GPU's uuid; the engine on the same GPU opens
it. A buffer is exported once and its mapping is kept, as with shared memory: torch makes new bookkeeping for a storage
with each export and frees it only with the storage. Invariant: the sender holds the buffer until it has all receipts.

Send weights by broadcast over a process group of trainer rank 0 and all engines (NCCL or gloo). It is used if engines
run on other devices or hosts than the trainers. The group is private: it does not affect the default groups of either
side. Invariant: trainer rank 0 is rank 0 of the group, and rank i of the engines' workers is i + 1. A member whose
broadcast fails leaves immediately, so that a peer's death ends every member's wait.
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
    """Settings that both halves share, made once by the controller."""

    name: TransportName
    """The kind of transport."""
    run_id: str
    """Unique per run; prefix of the names of files and stores."""
    device: str = "cpu"
    """Device of the buckets, "cpu" or "cuda"."""
    bucket_size_bytes: int = 256 << 20
    """Largest buffer (a single larger tensor still gets its own)."""
    verify: bool = True
    """Whether fingerprints are computed and checked."""
    master_address: str = "127.0.0.1"
    """Collective only: host of the rendezvous store (trainer rank 0)."""
    master_port: int = 0
    """Collective only: port of the store."""
    receivers: tuple[int, ...] = ()
    """Collective only: ranks of the engines' workers that receive, besides 1 trainer that sends."""
    timeout_s: float = 600.0
    """Collective only: seconds that one operation may take."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further options of a transport."""

    @property
    def world_size(self) -> int:
        """Processes of a collective."""
        return 1 + len(self.receivers)


class SenderTransport(Protocol):
    """Transport half in a trainer rank."""

    needs_send: bool
    """True if `send` must run while receivers receive."""

    def buffer(self, num_bytes: int, index: int) -> torch.Tensor:
        """Return a uint8 buffer of at least `num_bytes` for bucket `index`, which bucket `index + 2` reuses."""

    def publish(self, bucket: Bucket) -> None:
        """Add the handle with which receivers on this node or device open the packed buffer."""

    def send(self, bucket: Bucket) -> None:
        """Send the packed buffer (sending transports only)."""

    def close(self) -> None:
        """Free buffers, files and groups."""


class ReceiverTransport(Protocol):
    """Transport half in a generator."""

    def receive(self, bucket: Bucket) -> torch.Tensor:
        """Return the bucket's bytes as a uint8 tensor, which is valid until bucket `index + 2` is received."""

    def close(self) -> None:
        """Free mappings and groups."""


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
    """Trainer half, which only one rank per node uses (see `WeightSender`)."""

    needs_send = False

    def __init__(self, spec: TransportSpec):
        self._spec = spec
        self._buffers: dict[int, SharedBuffer] = {}

    def buffer(self, num_bytes: int, index: int) -> torch.Tensor:
        """See `SenderTransport.buffer`. It grows by allocating new memory, so old mappings stay valid."""
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


_DEVICE_ARGUMENT = 6
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
        """See `SenderTransport.buffer`. The buffer is on this rank's GPU."""
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
        """Return the time limit of a broadcast, which can be long for gloo, as it notices a dead peer by itself."""
        if not self._on_gpu:
            return self._timeout
        return min(self._timeout, timedelta(seconds=BROADCAST_TIMEOUT_S + num_bytes / LEAST_BYTES_PER_S))

    def leave(self) -> None:
        """Close this member's connections, and free an NCCL communicator's GPU memory before its collection."""
        if self._group is not None and self._on_gpu:
            self._group.abort()  # all broadcasts have been waited for, so that no work is lost
        self._group = None


def _join(spec: TransportSpec, rank: int) -> Any:
    """Join the other members at the address, and return a backend with `broadcast` (gloo on CPU, NCCL on CUDA)."""
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
        """See `ReceiverTransport.receive`. It blocks until trainer rank 0 sends."""
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._spec.device)
        self._member.broadcast(flat)
        return flat

    def close(self) -> None:
        """Leave the group."""
        self._member.leave()
