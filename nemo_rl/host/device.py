"""The only place that knows which accelerator a rank runs on.

Everything else asks a `Device` for its torch device, collective backend and memory facts, so one code path serves CPU
and CUDA. Invariant: the string "cuda" does not leave this file, weight_sync and backend folders.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nemo_rl.utils.errors import ConfigError

DeviceKind = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Device:
    """One kind of compute device.

    Attributes:
        kind: "cuda" or "cpu", the value of `cluster.device`.
    """

    kind: DeviceKind

    @property
    def is_gpu(self) -> bool:
        """Whether ranks own a GPU."""
        return self.kind == "cuda"

    @property
    def collective_backend(self) -> str:
        """The `torch.distributed` backend: nccl on GPUs, gloo on CPUs."""
        return "nccl" if self.is_gpu else "gloo"

    def torch_device(self, local_rank: int = 0) -> torch.device:
        """The torch device of a rank; Ray shows each rank its own GPU as the first one."""
        return torch.device("cuda", local_rank) if self.is_gpu else torch.device("cpu")

    def activate(self, local_rank: int = 0) -> torch.device:
        """Make the rank's device current.

        Raises:
            ConfigError: a GPU was asked for and this process sees none.
        """
        if self.is_gpu:
            if not torch.cuda.is_available():
                raise ConfigError(
                    "cluster.device=cuda, but this process sees no CUDA device. "
                    "Run on a GPU machine or set cluster.device=cpu."
                )
            torch.cuda.set_device(local_rank)
        return self.torch_device(local_rank)

    def synchronize(self) -> None:
        """Wait for queued GPU work; nothing to do on a CPU."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Give cached GPU memory back to the driver; nothing to do on a CPU."""
        if self.is_gpu:
            torch.cuda.empty_cache()


def device_for(uses_gpu: bool) -> Device:
    """The device of ranks that own a GPU, or of ranks that own none."""
    return Device("cuda" if uses_gpu else "cpu")


def free_cache(device: torch.device) -> None:
    """Wait for a device's work, and leave no memory on it that this process does not use; on a CPU there is none."""
    kind = device_for(uses_gpu=device.type != "cpu")
    kind.synchronize()
    kind.empty_cache()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Send a tensor without waiting for it: a GPU takes it from page-locked memory, in the order of its work."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Fetch a tensor without waiting for it; from a GPU it is there behind `Device.synchronize`."""
    return tensor.to("cpu", non_blocking=True)


def gpu_count() -> int:
    """Number of CUDA devices this process can see."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
