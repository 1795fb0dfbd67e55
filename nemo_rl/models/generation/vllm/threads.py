"""How many CPU threads an engine computes on.

A small model gains a fourth to a third from a second thread (measured at 3 and 25 million parameters) while a core is
free for it, and is several times slower where another process wants that core, since threads wait for each other after
each operation; so the engine looks, every `_WINDOW_S` of computing, how busy the other processes were. One of a million
gains as much where it reads prompts, and next to nothing where it decodes. A large model takes all cores that are its.
Invariant: the number of threads changes no bit of a small model's answers, so that a resumed run draws the same tokens:
attention does not divide rows among threads (`VLLM_CPU_ATTN_SPLIT_KV`; latent attention does, and keeps one), and
`thread_count_changes_bits` asks the matrix products.
"""

import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from vllm import _custom_ops
from vllm.config import ModelConfig
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from nemo_rl.host.cores import usable_cores

logger = logging.getLogger(__name__)

TINY_MODEL = 2_000_000
"""Parameters from which on a second thread can pay when a model decodes."""
SMALL_MODEL = 100_000_000
"""Parameters from which on a model is large."""
_FREE_CORES = 1.5
"""Cores that other processes leave, from which on a small model takes two threads."""
_WINDOW_S = 0.2
"""/proc counts hundredths of a second."""
_STAT = Path("/proc/stat")
_CHECKED_ROWS = (1, 2, 16, 128)
_MOST_COLUMNS = 8192
"""Of a product that is asked; with more there is only more to divide among threads beside the sum."""


class ThreadChoice:
    """One thread or two for the steps of an engine, by what other processes leave of its cores.

    Args:
        num_cores: cores that are this engine's.
        decodes_on_one: take two only for steps that read prompts.
    """

    def __init__(self, num_cores: int, *, decodes_on_one: bool = False):
        self._num_cores = num_cores
        self._decodes_on_one = decodes_on_one
        self._core_is_free = True
        self._window: tuple[float, float] | None = None
        """When the measurement began, and what other processes had used by then."""

    def begin_step(self, *, reads_prompts: bool) -> None:
        """The engine computes."""
        if self._window is None:
            self._window = (time.monotonic(), busy_seconds_of_others())
        set_threads(2 if self._core_is_free and (reads_prompts or not self._decodes_on_one) else 1)

    def end_step(self, *, has_more: bool) -> None:
        """The engine has computed; `has_more` tells whether it does so again at once."""
        assert self._window is not None, "begin_step comes first"
        began, busy = self._window
        seconds = time.monotonic() - began
        if seconds >= _WINDOW_S:
            others = (busy_seconds_of_others() - busy) / seconds
            self._core_is_free = self._num_cores - others >= _FREE_CORES
        if seconds >= _WINDOW_S or not has_more:
            self._window = None


def busy_seconds_of_others() -> float:
    """Processor seconds that other processes have used, since some fixed time, on the cores this one may use."""
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in _STAT.read_text().splitlines():
        name, *values = line.split()
        if name in mine:
            user, nice, system, _idle, _iowait, interrupts, soft_interrupts = map(int, values[:7])
            ticks += user + nice + system + interrupts + soft_interrupts
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def cores_of_each(workers_on_machine: int) -> int:
    """Cores of this machine for each of its engines' workers, at least 1."""
    return max(1, usable_cores() // workers_on_machine)


def start_threads(model: torch.nn.Module, config: ModelConfig, num_cores: int) -> ThreadChoice | None:
    """Set the threads that an engine begins with.

    Args:
        model: as vLLM has packed it.
        config: what vLLM knows of it.
        num_cores: cores that are this engine's.

    Returns:
        Who changes them later; None if they stay.
    """
    products: list[Any] = [module for module in model.modules() if isinstance(module, LinearBase)]
    shapes = [(product.output_size, product.input_size) for product in products]
    heads: list[Any] = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    shapes += [(head.num_embeddings, head.embedding_dim) for head in heads]
    # What the layers have packed is no parameter any more, and a quantized one may have been none before.
    packed = [shape for product, shape in zip(products + heads, shapes, strict=True) if not _has_weight(product)]
    num_parameters = sum(out * in_ for out, in_ in packed) + sum(each.numel() for each in model.parameters())
    if num_parameters >= SMALL_MODEL:
        set_threads(num_cores)
        return None
    assert isinstance(config.dtype, torch.dtype), "vLLM resolves names"
    asked = {(min(out, _MOST_COLUMNS), in_) for out, in_ in shapes}
    if num_cores == 1 or config.use_mla or thread_count_changes_bits(asked, config.dtype):
        return None
    # oneDNN computes a product on as many threads as there were when it met its shape, or on fewer.
    set_threads(2)
    return ThreadChoice(num_cores, decodes_on_one=num_parameters < TINY_MODEL)


def _has_weight(product: Any) -> bool:
    weight = getattr(product, "weight", None)
    return weight is not None and weight.numel() > 0


def thread_count_changes_bits(shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> bool:
    """Whether matrix products of `[T, in]` by `[out, in]` differ between one thread and two.

    They do where the sum over `in` is divided among threads, which oneDNN decides by the shape.

    Args:
        shapes: `(out, in)` of each product.
        dtype: of both factors.
    """
    if not _custom_ops._supports_onednn:
        return True
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    try:
        for shape in shapes:
            handler = _custom_ops.create_onednn_mm(torch.randn(shape, generator=generator).to(dtype).t())
            for count in _CHECKED_ROWS:
                rows = torch.randn(count, shape[1], generator=generator).to(dtype)
                set_threads(2)
                on_two = _custom_ops.onednn_mm(handler, rows, None)
                set_threads(1)
                if not torch.equal(on_two, _custom_ops.onednn_mm(handler, rows, None)):
                    logger.info("A product of %s by %s has other last digits on two threads.", rows.shape, shape)
                    return True
        return False
    except RuntimeError:  # oneDNN has no such product here: vLLM takes another kernel, which this does not ask
        return True
    finally:
        set_threads(before)


def set_threads(count: int) -> None:
    """Compute on a number of threads from now on; vLLM has replaced `torch.set_num_threads` by nothing."""
    if count != torch.get_num_threads():
        torch._C.set_num_threads(count)
