"""What a transport is: how the bytes of a bucket get from a trainer rank to a generator.

A transport has two halves that live in different processes and share only a picklable spec. Fetching transports (shared
memory, CUDA IPC) leave the bytes where the receiver can map them; sending transports (collectives) move them while both
sides take part. Invariant: transports move bytes and never look inside.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from nemo_rl.weight_sync.buckets import Bucket

TransportName = Literal["shared_memory", "cuda_ipc", "collective"]


@dataclass(frozen=True)
class TransportSpec:
    """Everything both halves need to agree on, made once by the controller.

    Attributes:
        name: which transport.
        run_id: unique per run; prefixes names of files and stores.
        device: "cpu" or "cuda", where buckets live.
        bucket_size_bytes: largest buffer (a single larger tensor still gets its own).
        verify: whether fingerprints are made and checked.
        master_address: collective only, host of the rendezvous store (trainer rank 0).
        master_port: collective only.
        world_size: collective only, 1 trainer + workers of all engines.
        timeout_s: collective only, limit of one operation.
        extra: room for transport options.
    """

    name: TransportName
    run_id: str
    device: str = "cpu"
    bucket_size_bytes: int = 256 << 20
    verify: bool = True
    master_address: str = "127.0.0.1"
    master_port: int = 0
    world_size: int = 0
    timeout_s: float = 600.0
    extra: dict[str, Any] = field(default_factory=dict)


class SenderTransport(Protocol):
    """The half inside a trainer rank."""

    needs_send: bool
    """Whether `send` must run while receivers receive."""

    def buffer(self, num_bytes: int, index: int) -> torch.Tensor:
        """A uint8 buffer of at least `num_bytes` for bucket `index`; reused by bucket `index + 2`."""

    def publish(self, bucket: Bucket) -> None:
        """Add the handle by which receivers on this place reach the packed buffer."""

    def send(self, bucket: Bucket) -> None:
        """Push the packed buffer (sending transports only)."""

    def close(self) -> None:
        """Free buffers, files and groups."""


class ReceiverTransport(Protocol):
    """The half inside a generator."""

    def receive(self, bucket: Bucket) -> torch.Tensor:
        """The bucket's bytes as a uint8 tensor; valid until bucket `index + 2` is received."""

    def close(self) -> None:
        """Free mappings and groups."""
