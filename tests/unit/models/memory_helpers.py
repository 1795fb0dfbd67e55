"""Measure the peak memory of a process, and write large random models without holding them whole."""

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from nemo_rl.models.huggingface.tensor_files import header_bytes, raw_bytes

MIB = 1024**2


def return_freed_memory() -> None:
    """Make glibc return freed memory: it keeps tens of MiB otherwise, whatever the model's size."""
    m_trim_threshold, m_mmap_threshold = -1, -3
    libc = ctypes.CDLL(None)
    libc.mallopt(m_mmap_threshold, 128 * 1024)
    libc.mallopt(m_trim_threshold, 128 * 1024)


def anonymous_mib() -> float:
    """Return the memory of this process that is not backed by a file, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


class Peak:
    """Peak memory. Attributes: `mib`, the most memory seen above the start."""

    mib = 0.0


@contextmanager
def measured(start_mib: float) -> Iterator[Peak]:
    """Sample the memory of this process every millisecond while the block runs."""
    peak, done = Peak(), threading.Event()

    def sample() -> None:
        while not done.is_set():
            peak.mib = max(peak.mib, anonymous_mib() - start_mib)
            time.sleep(0.001)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield peak
    finally:
        done.set()
        sampler.join()
        peak.mib = max(peak.mib, anonymous_mib() - start_mib)


def write_random_llama(folder: Path, **sizes: int) -> tuple[float, float]:
    """Write a model in bfloat16, tensor by tensor.

    Returns:
        MiB of the model and of one of its layers, in float32.
    """
    config = LlamaConfig(**sizes, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header_bytes({name: (torch.bfloat16, shape) for name, shape in shapes.items()}))
        for shape in shapes.values():
            file.write(raw_bytes((0.02 * torch.randn(shape)).to(torch.bfloat16)))
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    return sum(parameter.nbytes for parameter in model.parameters()) / MIB, layer / MIB
