"""Describe the accelerator on which a rank runs.

All other code asks a `Device` for its torch device, collective backend and memory, so one code path serves CPU and
CUDA. Invariant: the string "cuda" does not appear outside this file, weight_sync and the backend folders.
"""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from packaging.version import Version
from torch import Tensor

from nemo_rl.utils.errors import ConfigError

DeviceKind = Literal["cuda", "cpu"]
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_ROUNDS_UP_TO = "pinned_max_round_threshold_mb"
_ROUNDED_MB = 1


@dataclass(frozen=True)
class Device:
    """One kind of compute device."""

    kind: DeviceKind
    """Value of `cluster.device`: "cuda" or "cpu"."""

    @property
    def is_gpu(self) -> bool:
        """True if ranks own a GPU."""
        return self.kind == "cuda"

    @property
    def collective_backend(self) -> str:
        """The `torch.distributed` backend: nccl on GPUs, gloo on CPUs."""
        return "nccl" if self.is_gpu else "gloo"

    def torch_device(self, local_rank: int = 0) -> torch.device:
        """Return the torch device of a rank.

        `local_rank` indexes the GPUs that the process sees: 0 in the policy's Ray workers, which see their own first.
        """
        return torch.device("cuda", local_rank) if self.is_gpu else torch.device("cpu")

    def activate(self, local_rank: int = 0) -> torch.device:
        """Make the rank's device current.

        Raises:
            ConfigError: a GPU is configured, but this process sees none.
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
        """Wait for queued GPU work, or do nothing on a CPU."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Return cached GPU memory to the driver, or do nothing on a CPU."""
        if self.is_gpu:
            torch.cuda.empty_cache()


def device_for(uses_gpu: bool) -> Device:
    """Return the device of ranks with a GPU, or of ranks without one."""
    return Device("cuda" if uses_gpu else "cpu")


def free_cache(device: torch.device) -> None:
    """Wait for a GPU's work and release its unused cached memory, or do nothing on a CPU."""
    kind = device_for(uses_gpu=device.type != "cpu")
    kind.synchronize()
    kind.empty_cache()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Send a tensor to a device without waiting. A GPU copies the tensor from page-locked memory, in stream order."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Fetch a tensor without waiting. Values from a GPU are valid only after `Device.synchronize`."""
    return tensor.to("cpu", non_blocking=True)


def device_name(device: torch.device) -> str:
    """Return the model of a device, with the kernels and threads of a CPU.

    Devices of the same name compute the same bits.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name, kernels = next(named, platform.machine()), torch.backends.cpu.get_cpu_capability()
    return f"{name}, {kernels}, {torch.get_num_threads()} threads"


def has_no_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16 matrices one number at a time.

    oneDNN needs AVX-512 for them. On one core of an AMD EPYC with AVX2, torch multiplies 512 x 512 matrices in 440 ms,
    and in 4 to 8 ms in float32. Forward and backward pass of a linear layer of 576 x 1536 for 512 tokens take 1.1 s
    and 0.07 s.
    """
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx2")) and not has.get("avx512_f")


def gpu_is_in_use() -> bool:
    """Return whether this process has started to use a GPU, so that its visible GPUs can no longer change."""
    return torch.cuda.is_initialized()


def gpu_count() -> int:
    """Return the number of CUDA devices that this process can see."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def allocator_settings(own: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return the variable that sets torch's allocators, which is the first one with a value, and its value.

    Args:
        own: variables that a process gets besides, or instead of, those of this process.
    """
    found = {name: (own or {}).get(name, os.environ.get(name, "")) for name in _ALLOCATOR_VARIABLES}
    name = next((name for name, value in found.items() if value), _ALLOCATOR_VARIABLES[0])
    return name, found[name]


def exact_page_locking(own: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that keeps torch from rounding larger page-locked tensors up to a power of two bytes.

    Args:
        own: as in `allocator_settings`. Other settings of the allocators, in `own` or in this process, are kept.
    """
    name, settings = allocator_settings(own)
    if _ROUNDS_UP_TO in settings or Version(torch.__version__) < Version("2.13"):  # older versions refuse the setting
        return {}
    return {name: ",".join(filter(None, (settings, f"{_ROUNDS_UP_TO}:{_ROUNDED_MB}")))}
