"""Provide the library's training backends with reference weights, saving, and state in host memory.

The reference is a copy of the initial weights in host memory, or the model without its adapters, which needs no copy.
The parts of a checkpoint are prepared before they are written, and copied if training continues during the write. While
other models use the device, a model's state can be kept in host memory.

Invariants: if `Keep` copies the state, a `Write` writes the state at the time of its preparation. Host memory is
allocated once for each tensor and reused by later moves. It is page-locked if a GPU copies from and to it. The state
returns to the device unchanged, bit for bit.
"""

import random
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, override

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_logprobs import SamplingDensity
from nemo_rl.host.device import device_for
from nemo_rl.models.training.interfaces import CheckpointPaths, PolicyBackend
from nemo_rl.models.training.low_rank import adapters_off
from nemo_rl.utils.errors import CheckpointError, ConfigError
from nemo_rl.weight_sync.exchange import everywhere

type Keep = Callable[[str, Tensor], Tensor]
"""Function from a name and a tensor to the tensor to write: itself, or a copy that later updates do not change."""
type Write = Callable[[dist.ProcessGroup | None], None]
"""Function that writes a prepared part of a checkpoint. Its argument is the group of ranks (None: default group)."""


def as_it_is(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor itself, for parts that are written immediately."""
    return tensor


class HostMemory:
    """Named copies of tensors in host memory.

    Args:
        pinned: Whether to page-lock the memory for asynchronous copies to and from a GPU (see
            `host.device.exact_page_locking`).
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._copies: dict[str, Tensor] = {}

    def store(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor, sharded or not, into the memory of this name.

        Returns:
            The copy, which the next `store` with this name overwrites. A copy from a GPU can be read on the host
            after a synchronisation, and by later work of the same GPU immediately.
        """
        held = self._copies.get(name)
        if held is None:
            held = self._copies[name] = torch.empty_like(tensor, device="cpu", pin_memory=self._pinned)
        return held.copy_(tensor, non_blocking=True)

    def __contains__(self, name: str) -> bool:
        """Return whether a tensor was stored under the name."""
        return name in self._copies


@torch.no_grad()
def move_state(optimizer: Optimizer, memory: HostMemory, device: torch.device, *, to_host: bool) -> None:
    """Move an optimizer's state from a device to host memory or back, except step counts.

    State on other devices is not moved, and neither are entries that are the parameter itself.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.dim() == 0 or value is parameter:
                continue
            place = f"{index}.{name}"
            if to_host and _is_on(device, value):
                state[name] = memory.store(place, value)
            elif not to_host and place in memory:
                state[name] = _copy(value, device)


@torch.no_grad()
def move_weights(model: nn.Module, memory: HostMemory, device: torch.device, *, to_host: bool) -> None:
    """Move a model's parameters and buffers to host memory or to a device. They must already be resharded."""
    if not to_host:
        model._apply(lambda tensor: _copy(tensor, device))
        return
    named = [*model.named_parameters(), *model.named_buffers()]
    copies = {id(tensor): memory.store(name, tensor) for name, tensor in named}
    # # FSDP2 reads the tensors from `_apply` on the host, where it pads an uneven shard into separate memory.
    device_for(uses_gpu=device.type != "cpu").synchronize()
    model._apply(lambda tensor: copies[id(tensor)])


def _is_on(device: torch.device, tensor: Tensor) -> bool:
    return tensor.device.type == device.type


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device, non_blocking=True, copy=True)


class TorchBackend(PolicyBackend):
    """Base class of the library's training backends."""

    optimizer: Any = None
    """The optimizer. None if the model is not trained."""
    scheduler: Any = None
    """Learning-rate schedule of the optimizer. None without an optimizer."""
    _has_reference = False
    _reference: dict[str, Tensor] | None = None
    _replaced: HostMemory
    """Host memory for the current weights while the reference weights are in use."""
    _writers: dist.ProcessGroup | None = None

    @abstractmethod
    def adapters(self) -> Iterable[Any]:
        """Return the adapters of this rank's layers, with their attribute `active`."""

    @abstractmethod
    def copied_weights(self, memory: HostMemory) -> dict[str, Tensor]:
        """Copy this rank's part of every weight to host memory."""

    @abstractmethod
    def put_weights(self, copies: dict[str, Tensor]) -> None:
        """Copy the result of `copied_weights` into the model."""

    @abstractmethod
    def prepared(self, paths: CheckpointPaths, keep: Keep) -> Iterator[Write]:
        """Yield the writes of a checkpoint's parts. A part is prepared only when the iteration reaches it."""

    @abstractmethod
    def staged(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor to host memory, for a write in the background."""

    @override
    def iterate_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        yield from everywhere(self.held_weights(dtype), dist.group.WORLD)

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Run a block with the reference weights (`PolicyBackend.reference_weights`).

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


def rng_state() -> dict[str, Any]:
    """Return the states of this process's random generators, in types that can be loaded without executing code."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    inner = numpy_state["state"]
    return {
        "python": random.getstate(),
        "numpy": {
            **numpy_state,
            "state": {"key": torch.from_numpy(inner["key"].astype(np.int64)), "pos": inner["pos"]},
        },
        "torch": torch.get_rng_state(),
        "accelerator": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def rng_file(folder: Path) -> Path:
    """Return the file in an optimizer folder that holds the random state of this rank."""
    return folder / "rng" / f"rank_{dist.get_rank():05d}.pt"


def restore_rng_state(state: dict[str, Any]) -> None:
    """Restore the state that `rng_state` returned."""
    random.setstate(state["python"])
    numpy_state = state["numpy"]
    key, position = numpy_state["state"]["key"], numpy_state["state"]["pos"]
    inner = {"key": key.numpy().astype(np.uint32), "pos": position}
    np.random.set_state({**numpy_state, "state": inner})
    torch.set_rng_state(state["torch"])
    if state["accelerator"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["accelerator"])


def sampling_density(config: PolicyConfig, never: tuple[int, ...] = ()) -> SamplingDensity:
    """Return the density from which `policy.generation` samples. Without this section, it is the plain softmax.

    Args:
        never: ids of tokens that are never drawn.
    """
    generation = config.generation
    if generation is None:
        return SamplingDensity()
    top_k = generation.top_k if generation.top_k is not None and generation.top_k > 0 else None
    return SamplingDensity(generation.temperature, top_k, generation.top_p, never)
