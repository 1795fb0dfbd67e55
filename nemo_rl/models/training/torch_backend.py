"""Share what the library's own training backends do alike: reference weights and saves.

Invariant: the reference is a copy of the initial weights in host memory, or the model without its adapters, which then
needs no copy; a save that is staged writes the state as it was when it was staged.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, override

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl.host.device import device_for
from nemo_rl.models.training.checkpoint_writes import Keep, Write, as_it_is
from nemo_rl.models.training.host_memory import HostMemory
from nemo_rl.models.training.interfaces import CheckpointPaths, PolicyBackend
from nemo_rl.models.training.low_rank import adapters_off
from nemo_rl.utils.errors import CheckpointError, ConfigError
from nemo_rl.weight_sync.exchange import everywhere


class TorchBackend(PolicyBackend):
    """A backend of this library."""

    optimizer: Any = None
    """The optimizer; None if the model is not trained."""
    scheduler: Any = None
    """Its learning-rate schedule, or None."""
    _has_reference = False
    _reference: dict[str, Tensor] | None = None
    _replaced: HostMemory
    """Holds the current weights while the reference is in use."""
    _writers: dist.ProcessGroup | None = None

    @abstractmethod
    def adapters(self) -> Iterable[Any]:
        """Return the adapters of this rank's layers, each with `active`."""

    @abstractmethod
    def copied_weights(self, memory: HostMemory) -> dict[str, Tensor]:
        """Copy this rank's part of every weight to host memory."""

    @abstractmethod
    def put_weights(self, copies: dict[str, Tensor]) -> None:
        """Copy the result of `copied_weights` into the model."""

    @abstractmethod
    def prepared(self, paths: CheckpointPaths, keep: Keep) -> Iterator[Write]:
        """Yield the writes of a checkpoint's parts; each part is prepared when the iterator reaches it."""

    @abstractmethod
    def staged(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor to host memory, for a write in the background."""

    @override
    def iterate_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        yield from everywhere(self.held_weights(dtype), dist.group.WORLD)

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """See `PolicyBackend.reference_weights`.

        Raises:
            ConfigError: the policy was made with `init_reference_model=False`.
        """
        if not self._has_reference:
            raise ConfigError("Reference log-probabilities need Policy(init_reference_model=True).")
        if self._reference is None:
            with adapters_off(self.adapters()):
                yield
            return
        current = self.copied_weights(self._replaced)
        self.put_weights(self._reference)
        try:
            yield
        finally:
            self.put_weights(current)

    @override
    def save(self, paths: CheckpointPaths) -> None:
        self._require_optimizer(paths)
        for write in self.prepared(paths, as_it_is):
            write(None)

    @override
    def stage_save(self, paths: CheckpointPaths) -> Callable[[], None]:
        self._require_optimizer(paths)
        if self._writers is None:
            self._writers = dist.new_group(backend="gloo")
        writes, group = list(self.prepared(paths, self.staged)), self._writers
        device_for(uses_gpu=self.device.type != "cpu").synchronize()

        def write_all() -> None:
            for write in writes:
                write(group)

        return write_all

    def _require_optimizer(self, paths: CheckpointPaths) -> None:
        if paths.optimizer is not None and self.optimizer is None:
            raise CheckpointError("This policy has no optimizer to save; leave optimizer_path out.")
