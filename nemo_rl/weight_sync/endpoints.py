"""Implement the two ends of a weight stream: `WeightSender` in trainer ranks, `WeightReceiver` in engines.

Flow of one sync, driven by the controller (`algorithms.rollout.refit`):

    sender.begin(version, tensors) ─► bucket = sender.next_bucket() ─► receiver.received(bucket) ─┐
                                              ▲────────────────────── until bucket.is_last ◄──────┘
    receiver.finish() ─► SyncReceipt ─► verify.check_receipts

Invariant: all trainer ranks walk the tensor stream in step (gathering is collective), even those that do not pack.
"""

import dataclasses
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.buckets import Bucket, TensorSlot, group_by_size, pack, plan_slots, unpack
from nemo_rl.weight_sync.collective import CollectiveReceiver, CollectiveSender
from nemo_rl.weight_sync.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from nemo_rl.weight_sync.shared_memory import SharedMemoryReceiver, SharedMemorySender
from nemo_rl.weight_sync.transport import ReceiverTransport, SenderTransport, TransportSpec
from nemo_rl.weight_sync.verify import SyncReceipt, fingerprints, mismatched_names


def make_sender_transport(spec: TransportSpec, rank: int, is_node_leader: bool) -> SenderTransport | None:
    """Make the transport into which a trainer rank packs, or None if the rank only takes part in gathering."""
    if spec.name == "cuda_ipc":
        return CudaIpcSender(spec)
    if spec.name == "shared_memory":
        return SharedMemorySender(spec) if is_node_leader else None
    return CollectiveSender(spec) if rank == 0 else None


def make_receiver_transport(spec: TransportSpec, rank: int) -> ReceiverTransport:
    """Make the transport of the engines' worker `rank`."""
    if spec.name == "cuda_ipc":
        return CudaIpcReceiver(spec)
    if spec.name == "shared_memory":
        return SharedMemoryReceiver(spec)
    return CollectiveReceiver(spec, rank=rank + 1)


class WeightSender:
    """Streams one trainer rank's gathered tensors as buckets.

    Args:
        spec: settings that both ends share.
        rank: global trainer rank.
        is_node_leader: whether this rank packs for its host (shared memory).
    """

    def __init__(self, spec: TransportSpec, rank: int, is_node_leader: bool):
        self._spec = spec
        self._transport = make_sender_transport(spec, rank, is_node_leader)
        self._groups: Iterator[list[tuple[str, torch.Tensor]]] | None = None
        self._ahead: list[tuple[str, torch.Tensor]] | None = None
        self._index = 0

    @property
    def spec(self) -> TransportSpec:
        """The settings for which this sender was made."""
        return self._spec

    def begin(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Start a stream; `tensors` yields `(Hugging Face name, full tensor)` in the same order on all ranks."""
        self._groups = group_by_size(tensors, self._spec.bucket_size_bytes)
        self._ahead = next(self._groups, None)
        self._index = 0

    def next_bucket(self) -> Bucket:
        """Gather and pack the next bucket.

        Raises:
            WeightSyncError: the stream has ended or holds no tensor.
        """
        if self._groups is None or self._ahead is None:
            raise WeightSyncError("The weight stream is not open or holds no tensors.")
        group, self._ahead = self._ahead, next(self._groups, None)
        slots, num_bytes = plan_slots(group)
        bucket = Bucket(self._index, slots, num_bytes, is_last=self._ahead is None)
        self._index += 1
        if self._transport is not None:
            flat = self._transport.buffer(num_bytes, bucket.index)
            pack(group, slots, flat)
            if self._spec.verify:
                stamped = zip(slots, fingerprints(flat, slots), strict=True)
                bucket.slots = [dataclasses.replace(slot, fingerprint=value) for slot, value in stamped]
            self._transport.publish(bucket)
        return bucket

    def send(self, bucket: Bucket) -> None:
        """Send a packed bucket; only sending transports do anything."""
        if self._transport is not None and self._transport.needs_send:
            self._transport.send(bucket)

    def close(self) -> None:
        """Free the transport's buffers and connections."""
        if self._transport is not None:
            self._transport.close()


def merge_buckets(from_ranks: list[Bucket]) -> Bucket:
    """Join the ranks' reports about one bucket: fingerprints of the first rank that packed it, handles of all.

    Raises:
        WeightSyncError: ranks disagree on the bucket's tensors.
    """
    packers = [b for b in from_ranks if b.slots and b.slots[0].fingerprint is not None]
    merged = (packers or from_ranks)[0]
    for other in from_ranks:
        if _layout(other) != _layout(merged):
            raise WeightSyncError(f"Trainer ranks disagree on the tensors of bucket {merged.index}.")
        merged.handles.update(other.handles)
    return merged


def _layout(bucket: Bucket) -> list[TensorSlot]:
    """Return the part of a bucket on which all ranks must agree: everything but the fingerprints."""
    return [dataclasses.replace(slot, fingerprint=None) for slot in bucket.slots]


class WeightReceiver:
    """Gives an engine the tensors of a weight stream and checks them.

    Args:
        spec: settings that both ends share.
        rank: position among all workers of all engines.
        name: name in receipts.
    """

    def __init__(self, spec: TransportSpec, rank: int, name: str):
        self.spec = spec
        self._name = f"{name} on {socket.gethostname()}"
        self._transport = make_receiver_transport(spec, rank)
        self._receipt = SyncReceipt(self._name, version=-1)

    def begin(self, version: int) -> None:
        """Start counting for a new version."""
        self._receipt = SyncReceipt(self._name, version)

    @contextmanager
    def received(self, bucket: Bucket) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Fetch and check a bucket, and give its tensors to the block that loads them.

        Tensors of all buckets but the last are copied first: an engine may keep them until a layer is complete, and the
        sender reuses its buffers. After the block the bucket's bytes are no longer read.
        """
        flat = self._transport.receive(bucket)
        self._receipt.mismatched += mismatched_names(flat, bucket.slots)
        self._receipt.num_tensors += len(bucket.slots)
        self._receipt.num_bytes += bucket.num_bytes
        tensors = unpack(flat, bucket.slots)
        yield tensors if bucket.is_last else [(name, tensor.clone()) for name, tensor in tensors]
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)

    def finish(self, unbound: list[str]) -> SyncReceipt:
        """Close the stream; `unbound` names engine parameters that received nothing."""
        self._receipt.unbound = unbound
        return self._receipt

    def close(self) -> None:
        """Free the transport's buffers and connections."""
        self._transport.close()
