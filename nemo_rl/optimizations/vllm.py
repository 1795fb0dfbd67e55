"""Choose the number of CPU threads of an engine, and inspect its model's class in its own process.

A second thread reduces the time of a small model by a fourth to a third (measured at 3 and 25 million parameters) while
a core is free. Where another process needs that core, the model is several times slower, since threads wait for each
other after each operation. So the engine measures how busy the other processes were during every `_WINDOW_S` seconds of
computing. A model of a million parameters gains as much for prompts, and almost nothing for decoding. A large model
takes all of its cores, with or without this optimization.

Invariant: the number of threads changes no bit of a small model's answers, so that a resumed run draws the same tokens.
Attention does not divide rows among threads (`VLLM_CPU_ATTN_SPLIT_KV`; latent attention does, and stays on one thread),
and `thread_count_changes_bits` tests the matrix products.

Weights are always packed on the threads that the process started with (`packing_threads`). oneDNN's layout of a packed
weight may depend on the number of threads, and vLLM keeps one compiled product per shape and number of rows for all
weights of a process: with weights of another layout it computes wrong numbers, without an error. Without AVX-512 this
happens to weights with 192 rows.
"""

import logging
import os
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from vllm import _custom_ops
from vllm.config import ModelConfig
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.registry import ModelRegistry

from nemo_rl.host.capacity import usable_cores
from nemo_rl.host.threads import on_threads, set_threads

logger = logging.getLogger(__name__)

_THREADS_AT_START = torch.get_num_threads()
"""Number of threads at the start: one, unless `OMP_NUM_THREADS` in the run's configuration sets another number."""

TINY_MODEL = 2_000_000
"""Number of parameters below which a second thread saves no time in decoding."""
SMALL_MODEL = 100_000_000
"""Number of parameters from which a model is large."""
_FREE_CORES = 1.5
"""Number of cores that other processes must leave idle before a small model uses two threads."""
_WINDOW_S = 0.2
"""Duration of a measurement in seconds. /proc counts hundredths of a second."""
_STAT = Path("/proc/stat")
_CHECKED_ROWS = (1, 2, 16, 128)
_MOST_COLUMNS = 8192
"""Number of columns of a tested product. More columns would be divided among threads without changing the sum."""


class ThreadChoice:
    """Number of threads (one or two) for the steps of an engine, chosen by the number of its idle cores.

    Args:
        decodes_on_one: whether to use two threads only for steps that read prompts.
    """

    def __init__(self, num_cores: int, *, decodes_on_one: bool = False):
        self._num_cores = num_cores
        self._decodes_on_one = decodes_on_one
        self._core_is_free = True
        self._window: tuple[float, float] | None = None
        """Time at which the measurement started, and processor seconds of other processes at that time."""

    def begin_step(self, *, reads_prompts: bool) -> None:
        """Set the threads of a step, right before the engine computes it."""
        if self._window is None:
            self._window = (time.monotonic(), busy_seconds_of_others())
        set_threads(2 if self._core_is_free and (reads_prompts or not self._decodes_on_one) else 1)

    def end_step(self, *, has_more: bool) -> None:
        """Measure after a step.

        Args:
            has_more: whether the engine computes another step immediately.
        """
        assert self._window is not None, "begin_step comes first"
        began, busy = self._window
        seconds = time.monotonic() - began
        if seconds >= _WINDOW_S:
            others = (busy_seconds_of_others() - busy) / seconds
            self._core_is_free = self._num_cores - others >= _FREE_CORES
        if seconds >= _WINDOW_S or not has_more:
            self._window = None


def busy_seconds_of_others() -> float:
    """Return processor seconds that other processes have used since boot, on the cores that this one may use."""
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in _STAT.read_text().splitlines():
        name, *values = line.split()
        if name in mine:
            user, nice, system, _idle, _iowait, interrupts, soft_interrupts = map(int, values[:7])
            ticks += user + nice + system + interrupts + soft_interrupts
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def cores_of_each(workers_on_machine: int) -> int:
    """Return the cores of this machine for each engine worker on it, at least 1."""
    return max(1, usable_cores() // workers_on_machine)


def start_threads(
    model: torch.nn.Module, config: ModelConfig, num_cores: int, *, adapts: bool = True
) -> ThreadChoice | None:
    """Set the threads that an engine starts with.

    Args:
        model: model whose weights vLLM has packed.
        config: vLLM's configuration of the model.
        adapts: whether a small model may use a second thread.

    Returns:
        The choice that changes the number for each step, or None if the number stays the same.
    """
    products: list[Any] = [module for module in model.modules() if isinstance(module, LinearBase)]
    shapes = [(product.output_size, product.input_size) for product in products]
    heads: list[Any] = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    shapes += [(head.num_embeddings, head.embedding_dim) for head in heads]
    # A weight that a layer has packed is not a parameter any more; a quantized one may not have been one before.
    packed = [shape for product, shape in zip(products + heads, shapes, strict=True) if not _has_weight(product)]
    num_parameters = sum(out * in_ for out, in_ in packed) + sum(each.numel() for each in model.parameters())
    if num_parameters >= SMALL_MODEL:
        set_threads(num_cores)
        return None
    assert isinstance(config.dtype, torch.dtype), "vLLM resolves names"
    asked = {(min(out, _MOST_COLUMNS), in_) for out, in_ in shapes}
    if not adapts or num_cores == 1 or config.use_mla or thread_count_changes_bits(asked, config.dtype):
        return None
    # oneDNN never uses more threads for a product than existed at the first product of its shape.
    set_threads(2)
    return ThreadChoice(num_cores, decodes_on_one=num_parameters < TINY_MODEL)


def _has_weight(product: Any) -> bool:
    weight = getattr(product, "weight", None)
    return weight is not None and weight.numel() > 0


def thread_count_changes_bits(shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> bool:
    """Return whether matrix products of `[T, in]` by `[out, in]` differ between one thread and two.

    They differ if oneDNN divides the sum over `in` among threads, which depends on the shape.

    Args:
        shapes: `(out, in)` of each product.
        dtype: number format of both factors.
    """
    if not _custom_ops._supports_onednn:
        return True
    generator = torch.Generator().manual_seed(0)
    try:
        for shape in shapes:
            weight = torch.randn(shape, generator=generator).to(dtype)
            with packing_threads():
                handler = _custom_ops.create_onednn_mm(weight.t())
            for count in _CHECKED_ROWS:
                rows = torch.randn(count, shape[1], generator=generator).to(dtype)
                with on_threads(2):
                    on_two = _custom_ops.onednn_mm(handler, rows, None)
                with on_threads(1):
                    on_one = _custom_ops.onednn_mm(handler, rows, None)
                if not torch.equal(on_two, on_one):
                    logger.info("A product of %s by %s differs in its last digits on two threads.", rows.shape, shape)
                    return True
        return False
    except RuntimeError:  # oneDNN has no such product here, so vLLM uses another kernel, which is not tested
        return True


def packing_threads() -> AbstractContextManager[None]:
    """Compute loads and updates of weights in a block on the threads that the process started with."""
    return on_threads(_THREADS_AT_START)


def inspect_here(architectures: Iterable[str]) -> None:
    """Let vLLM inspect these model classes in this process, before other code needs their configuration.

    vLLM starts a Python process for each architecture that is new to the machine, to keep CUDA out of the parent
    process. Without CUDA that process only repeats all imports, 10 s on a fresh machine.

    Args:
        architectures: names of classes, from the model's configuration; those that vLLM does not know are skipped.
    """
    for architecture in architectures:
        entry = ModelRegistry.models.get(architecture)
        if entry is not None:
            ModelRegistry.register_model(architecture, entry.load_model_cls())
