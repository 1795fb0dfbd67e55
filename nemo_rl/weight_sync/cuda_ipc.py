"""Weights through CUDA IPC: engine and trainer rank share a GPU, so the bytes never leave it.

Every trainer rank packs the gathered bucket on its own GPU and publishes an IPC handle under that GPU's uuid; the
engine on the same GPU opens it. Invariant: the sender holds the buffer until all receipts are in.
"""

from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.interfaces import TransportSpec

_DEVICE_ARGUMENT = 6


def device_uuid(index: int = 0) -> str:
    """The physical identity of a visible GPU, equal in every process that sees it."""
    return str(torch.cuda.get_device_properties(index).uuid)


class CudaIpcSender:
    """Trainer half, in every rank."""

    needs_send = False

    def __init__(self, spec: TransportSpec):
        self._spec = spec
        self._buffers: dict[int, torch.Tensor] = {}

    def buffer(self, num_bytes: int, index: int) -> torch.Tensor:
        """See `SenderTransport.buffer`; on this rank's GPU."""
        held = self._buffers.get(index % 2)
        if held is None or held.numel() < num_bytes:
            held = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
            self._buffers[index % 2] = held
        return held[:num_bytes]

    def publish(self, bucket: Bucket) -> None:
        """Publish the IPC handle under this GPU's uuid, after the packing kernels have finished."""
        torch.cuda.synchronize()
        _, arguments = reduce_tensor(self._buffers[bucket.index % 2])
        bucket.handles[device_uuid(torch.cuda.current_device())] = arguments

    def send(self, bucket: Bucket) -> None:
        """Nothing to push: the engine maps the buffer."""

    def close(self) -> None:
        """Free the buffers."""
        self._buffers.clear()


class CudaIpcReceiver:
    """Generator half."""

    def __init__(self, spec: TransportSpec):
        self._spec = spec

    def receive(self, bucket: Bucket) -> torch.Tensor:
        """See `ReceiverTransport.receive`.

        Raises:
            WeightSyncError: no trainer rank runs on this engine's GPU.
        """
        uuid = device_uuid(torch.cuda.current_device())
        arguments: Any = bucket.handles.get(uuid)
        if arguments is None:
            raise WeightSyncError(
                f"No trainer rank shares GPU {uuid} with this engine (trainers are on "
                f"{sorted(bucket.handles)}). Set policy.generation.weight_sync.transport=collective."
            )
        rebuilt = list(arguments)
        rebuilt[_DEVICE_ARGUMENT] = torch.cuda.current_device()
        return rebuild_cuda_tensor(*rebuilt)[: bucket.num_bytes]

    def close(self) -> None:
        """Nothing is held between buckets."""
