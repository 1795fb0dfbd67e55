"""Weights through a memory-mapped file on the same host.

The trainer packs buckets straight into two files under /dev/shm that are reused by every sync, so pages
are touched only once; engines map the same files. Law: the sender never rewrites a buffer before the
controller has every receipt for the bucket that used it.
"""

import os
import socket
from pathlib import Path

import torch

from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.interfaces import TransportSpec

_NUM_BUFFERS = 2


def shared_folder() -> Path:
    """The memory-backed folder of this host (/dev/shm), else the temporary folder."""
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK) else Path(os.environ.get("TMPDIR", "/tmp"))


def map_file(path: str, num_bytes: int) -> torch.Tensor:
    """Map `num_bytes` of a file as a shared uint8 tensor."""
    storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=num_bytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]


class SharedMemorySender:
    """Trainer half; one per node does the work, see `WeightSender`."""

    needs_send = False

    def __init__(self, spec: TransportSpec):
        self._spec = spec
        self._buffers: dict[int, tuple[Path, torch.Tensor]] = {}
        self._generation = 0

    def buffer(self, num_bytes: int, index: int) -> torch.Tensor:
        """See `SenderTransport.buffer`; grows by making a new file, so old mappings stay valid."""
        slot = index % _NUM_BUFFERS
        held = self._buffers.get(slot)
        if held is None or held[1].numel() < num_bytes:
            if held is not None:
                held[0].unlink(missing_ok=True)
            self._generation += 1
            name = f"nemo_rl-{self._spec.run_id}-{os.getpid()}-{slot}-{self._generation}"
            path = shared_folder() / name
            held = (path, map_file(str(path), num_bytes))
            self._buffers[slot] = held
        return held[1][:num_bytes]

    def publish(self, bucket: Bucket) -> None:
        """Name the file for receivers on this host."""
        path, _ = self._buffers[bucket.index % _NUM_BUFFERS]
        bucket.handles[socket.gethostname()] = str(path)

    def send(self, bucket: Bucket) -> None:
        """Nothing to push: receivers map the file."""

    def close(self) -> None:
        """Remove the files."""
        for path, _ in self._buffers.values():
            path.unlink(missing_ok=True)
        self._buffers.clear()


class SharedMemoryReceiver:
    """Generator half: maps the sender's files, keeping each mapping for later syncs."""

    def __init__(self, spec: TransportSpec):
        self._spec = spec
        self._mappings: dict[str, torch.Tensor] = {}

    def receive(self, bucket: Bucket) -> torch.Tensor:
        """See `ReceiverTransport.receive`.

        Raises:
            WeightSyncError: the sender has no file on this host.
        """
        host = socket.gethostname()
        path = bucket.handles.get(host)
        if path is None:
            raise WeightSyncError(
                f"The trainer wrote shared memory on {sorted(bucket.handles)}, but this engine runs "
                f"on {host}. Set policy.generation.weight_sync.transport=collective."
            )
        mapped = self._mappings.get(path)
        if mapped is None or mapped.numel() < bucket.num_bytes:
            mapped = map_file(path, os.path.getsize(path))
            self._mappings[path] = mapped
            self._drop_stale()
        return mapped[: bucket.num_bytes]

    def _drop_stale(self) -> None:
        for path in [p for p in self._mappings if not os.path.exists(p)]:
            del self._mappings[path]

    def close(self) -> None:
        """Forget the mappings."""
        self._mappings.clear()
