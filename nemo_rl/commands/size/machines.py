"""Describe the GPUs that a run is sized for: memory and speeds, by name or by size.

Invariant: speeds are those of data sheets, for one direction of a link; `costs` has the shares that are reached.
"""

import re
from dataclasses import dataclass, replace

from nemo_rl.utils.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU in a machine."""

    name: str
    """Name on the command line."""
    memory_gib: float
    """Memory as `nvidia-smi` reports it."""
    tflops: float
    """Dense bfloat16 operations, in 1e12 a second."""
    memory_gb_s: float
    """Bandwidth of its memory, in 1e9 bytes a second."""
    link_gb_s: float
    """Bandwidth to another GPU of the machine, in 1e9 bytes a second."""
    network_gb_s: float
    """Bandwidth to other machines for each GPU, in 1e9 bytes a second."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", 79.6, 989.4, 3350.0, 450.0, 50.0),
        Gpu("h200", 140.4, 989.4, 4800.0, 450.0, 50.0),
        Gpu("b200", 179.0, 2250.0, 8000.0, 900.0, 50.0),
        Gpu("a100", 80.0, 312.0, 2039.0, 300.0, 25.0),
        Gpu("a100-40gb", 40.0, 312.0, 1555.0, 300.0, 25.0),
        Gpu("l40s", 45.0, 362.0, 864.0, 32.0, 12.5),
        Gpu("rtx4090", 24.0, 165.2, 1008.0, 32.0, 3.0),
    )
}
"""GPUs by name; the SXM module if there are several kinds. The network has one port for each GPU: of 400 Gb/s for
Hopper and Blackwell, 200 Gb/s for Ampere, 100 Gb/s for L40S, and 25 Gb/s for a desktop card."""

_SIZE = re.compile(r"([\d.]+)\s*(GiB|MiB)?", re.IGNORECASE)


def memory_of(text: str) -> float:
    """Read a memory size such as `80GiB`, in GiB.

    Raises:
        ConfigError: it is no positive size in GiB or MiB.
    """
    found = _SIZE.fullmatch(text.strip())
    number = float(found[1]) if found and found[1].count(".") <= 1 and found[1] != "." else 0.0
    if found is None or number <= 0:
        raise ConfigError(
            f"--gpu-memory {text}: give the memory of a GPU in GiB or MiB, as nvidia-smi reports it, for example 80GiB."
        )
    return number / 1024 if (found[2] or "").lower() == "mib" else number


def chosen_gpu(name: str | None, memory_gib: float | None) -> Gpu:
    """Return a GPU.

    Args:
        name: its name in `GPUS`; None takes the speeds of the first one.
        memory_gib: its memory; None takes that of the table.

    Raises:
        ConfigError: the name is unknown.
    """
    known = name is None or name.lower() in GPUS
    if not known:
        raise ConfigError(
            f"--gpu {name} is unknown.{did_you_mean(str(name), GPUS)} There are {', '.join(GPUS)}; for another one "
            "give its memory: --gpu-memory 80GiB."
        )
    gpu = next(iter(GPUS.values())) if name is None else GPUS[name.lower()]
    return gpu if memory_gib is None else replace(gpu, memory_gib=memory_gib)
