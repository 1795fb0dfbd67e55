"""Define transports, which move the bytes of a bucket from a trainer rank to a generator.

A transport has two halves in different processes, which share only a picklable spec. Fetching transports (shared
memory, CUDA IPC) leave the bytes where the receiver can map them; sending transports (collectives) move them while both
sides take part. Invariant: transports move bytes and never interpret them.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

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
        """Return a uint8 buffer of at least `num_bytes` for bucket `index`; bucket `index + 2` reuses it."""

    def publish(self, bucket: Bucket) -> None:
        """Add the handle with which receivers on this node or device open the packed buffer."""

    def send(self, bucket: Bucket) -> None:
        """Send the packed buffer (sending transports only)."""

    def close(self) -> None:
        """Free buffers, files and groups."""


class ReceiverTransport(Protocol):
    """Transport half in a generator."""

    def receive(self, bucket: Bucket) -> torch.Tensor:
        """Return the bucket's bytes as a uint8 tensor; valid until bucket `index + 2` is received."""

    def close(self) -> None:
        """Free mappings and groups."""
