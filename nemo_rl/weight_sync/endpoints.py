"""Send weights from trainer ranks (`WeightSender`), and receive them in engines (`WeightReceiver`).

The controller (`algorithms.rollout.refit`) runs one sync in this order:

    sender.begin(weights) ─► buckets = sender.next_buckets() ─► receiver.received(bucket of its lane) ─┐
                                          ▲───────────────────────── until bucket.is_last ◄────────────┘
    receiver.finish() ─► SyncReceipt ─► verify.check_receipts

Invariant: all trainer ranks call `next_buckets` together, including those that pack nothing, because a packing rank
gets blocks of weights from other ranks (`exchange`).
"""

import dataclasses
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from nemo_rl.host.threads import on_threads
from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.buckets import Bucket, TensorSlot, unpack
from nemo_rl.weight_sync.exchange import (
    BlockExchange,
    BlockReader,
    Blocks,
    Encoding,
    PackingStep,
    check_used,
    encoded_layout,
    fill,
    fill_encoded,
)
from nemo_rl.weight_sync.lanes import Lane
from nemo_rl.weight_sync.parts import Held, HeldWeights
from nemo_rl.weight_sync.transport import (
    CollectiveReceiver,
    CollectiveSender,
    CudaIpcReceiver,
    CudaIpcSender,
    ReceiverTransport,
    SenderTransport,
    SharedMemoryReceiver,
    SharedMemorySender,
    TransportSpec,
)
from nemo_rl.weight_sync.verify import SyncReceipt, fingerprints, mismatched_names


def _half_of_the_threads(device_type: str) -> AbstractContextManager[None]:
    """On CPUs, copy and check a bucket in a block on half of the process's threads.

    A trainer packs a bucket while engines of the same machine load the previous one. If both used all cores, operations
    would wait for threads without a core: 135 million parameters on two cores took 3.6 seconds instead of 1.7.
    """
    return on_threads(max(1, torch.get_num_threads() // 2)) if device_type == "cpu" else nullcontext()


def make_sender_transport(lane: Lane, rank: int, is_node_leader: bool) -> SenderTransport | None:
    """Return the transport with which a trainer rank packs for a lane, or None if the rank does not pack for it."""
    if lane.spec.name == "cuda_ipc":
        return CudaIpcSender(lane.spec)
    if lane.spec.name == "shared_memory":
        return SharedMemorySender(lane.spec) if is_node_leader else None
    return CollectiveSender(lane.spec) if rank == lane.sender else None


def make_receiver_transport(spec: TransportSpec, rank: int) -> ReceiverTransport:
    """Return the transport of a worker. `rank` is its number among the workers of all engines.

    Raises:
        ValueError: the worker is not in the lane.
    """
    if spec.name == "cuda_ipc":
        return CudaIpcReceiver(spec)
    if spec.name == "shared_memory":
        return SharedMemoryReceiver(spec)
    return CollectiveReceiver(spec, rank=spec.receivers.index(rank) + 1)


class WeightSender:
    """Stream the weights of a trainer rank as buckets, with one bucket per lane in each step.

    Args:
        rank: global trainer rank.
        is_node_leader: whether this rank packs for its host (shared memory).
        group: all trainer ranks; None if this rank holds all weights.
        encoding: converts weights to the tensors that are sent, which requires lanes of whole tensors; None if weights
            are sent unchanged.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        rank: int,
        is_node_leader: bool,
        group: dist.ProcessGroup | None = None,
        encoding: Encoding | None = None,
    ) -> None:
        self._lanes = lanes
        self._encoding = encoding
        self._transports: list[SenderTransport | None] = []
        for lane in lanes:
            self._transports.append(make_sender_transport(lane, rank, is_node_leader))
        self._exchange = BlockExchange(group)
        self._planned: Sequence[Held] | None = None
        self._steps: list[PackingStep] = []
        self._weights: HeldWeights | None = None
        self._reader: BlockReader | None = None
        self._index = 0

    @property
    def lanes(self) -> Sequence[Lane]:
        """The lanes for which this sender was made."""
        return self._lanes

    @property
    def encoding(self) -> Encoding | None:
        """The encoding of the weights, or None if they are sent unchanged."""
        return self._encoding

    @property
    def received_bytes(self) -> int:
        """Return the number of bytes of weights that this rank has received from other trainer ranks."""
        return self._exchange.received_bytes

    def begin(self, weights: HeldWeights) -> None:
        """Start a stream. The call is collective if the descriptions of the weights have changed since the last stream.

        Raises:
            WeightSyncError: ranks disagree about a tensor, lack parts of it, or the encoding applies to no weight.
        """
        described = weights.described()
        if described != self._planned:
            packs = [transport is not None for transport in self._transports]
            size = self._lanes[0].spec.bucket_size_bytes
            self._steps = self._exchange.plan(weights, packs, [lane.parts for lane in self._lanes], size)
            self._planned = described
            if self._encoding is not None:
                check_used(self._encoding, (slot for step in self._steps for slot in step.layouts[0].slots))
        self._weights, self._reader, self._index = weights, BlockReader(weights), 0

    def next_buckets(self) -> list[Bucket]:
        """Send blocks of the next tensors to the ranks that pack them. Return a packed bucket for each lane.

        Raises:
            WeightSyncError: the stream has ended or holds no tensor.
        """
        if self._reader is None or self._weights is None or self._index >= len(self._steps):
            raise WeightSyncError("The weight stream is not open or holds no tensors.")
        step = self._steps[self._index]
        with _half_of_the_threads(self._weights.device.type):
            blocks = self._exchange.run(step, self._reader.read(step), self._weights.device)
            if self._index == len(self._steps) - 1:
                self._reader.end()
            buckets = [self._packed(number, step, blocks) for number in range(len(self._lanes))]
        self._index += 1
        return buckets

    def _packed(self, number: int, step: PackingStep, blocks: Mapping[str, Blocks]) -> Bucket:
        """Return the bucket of a lane in a step. The buffer is filled if this rank packs for the lane."""
        lane, transport, layout = self._lanes[number], self._transports[number], step.layouts[number]
        is_last = self._index == len(self._steps) - 1
        sent = layout if self._encoding is None else encoded_layout(layout, self._encoding)
        bucket = Bucket(self._index, sent.slots, sent.num_bytes, is_last, number)
        if transport is not None:
            flat = transport.buffer(sent.num_bytes, bucket.index)
            if self._encoding is None:
                fill(flat, layout, blocks)
            else:
                fill_encoded(flat, sent, layout, blocks, self._encoding)
            if lane.spec.verify:
                stamped = zip(sent.slots, fingerprints(flat, sent.slots), strict=True)
                bucket.slots = [dataclasses.replace(slot, fingerprint=value) for slot, value in stamped]
            transport.publish(bucket)
        return bucket

    def send(self, bucket: Bucket) -> None:
        """Send a packed bucket if this rank packed it and the transport sends (`needs_send`)."""
        transport = self._transports[bucket.lane]
        if transport is not None and transport.needs_send and bucket.slots:
            transport.send(bucket)

    def close(self) -> None:
        """Free the transports' buffers and connections."""
        for transport in self._transports:
            if transport is not None:
                transport.close()


def merge_buckets(from_ranks: list[Bucket]) -> Bucket:
    """Join the ranks' descriptions of a bucket: the fingerprints of the first packing rank, and all handles.

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
    """Return the slots of a bucket without fingerprints. All ranks must agree on these."""
    return [dataclasses.replace(slot, fingerprint=None) for slot in bucket.slots]


class WeightReceiver:
    """Receive and check the tensors of a weight stream, in a worker of an engine.

    Args:
        spec: settings that both ends share.
        rank: number of the worker among the workers of all engines.
        name: name of the worker in receipts.
    """

    def __init__(self, spec: TransportSpec, rank: int, name: str):
        self.spec = spec
        self._name = f"{name} on {socket.gethostname()}"
        self._transport = make_receiver_transport(spec, rank)
        self._receipt = SyncReceipt(self._name, version=-1)

    def begin(self, version: int) -> None:
        """Start a new receipt, for the weights of a version."""
        self._receipt = SyncReceipt(self._name, version)

    @contextmanager
    def received(self, bucket: Bucket) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Receive and check a bucket, and run a block that loads its tensors.

        After the block, the bucket's bytes are no longer read.
        """
        if not bucket.slots:
            yield []
            return
        flat = self._transport.receive(bucket)
        with _half_of_the_threads(flat.device.type):
            self._receipt.mismatched += mismatched_names(flat, bucket.slots)
            tensors = unpack(flat, bucket)
        self._receipt.num_tensors += len(bucket.slots)
        self._receipt.num_bytes += bucket.num_bytes
        yield tensors
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)

    def finish(self, unbound: list[str], altered: Sequence[str] = ()) -> SyncReceipt:
        """Return the receipt of the stream.

        Args:
            unbound: names of engine parameters that received nothing.
            altered: names of engine parameters that hold other values than were received for them.
        """
        self._receipt.unbound, self._receipt.altered = unbound, list(altered)
        return self._receipt

    def close(self) -> None:
        """Free the transport's buffers and connections."""
        self._transport.close()
