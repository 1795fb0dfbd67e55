"""Runs tests of Megatron Core in ranks: one process imports it and is prepared for the CPU, and ranks are its forks.

The import takes seconds, and what `cpu_shim` patches must not reach the process of the tests.
"""

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from policy_helpers import run_ranks


def in_host(fn: Callable[..., Any], *args: Any) -> Any:
    """What `fn(*args)` returns in a process that has imported Megatron Core; it may call `run_ranks`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.pt"
        mp.start_processes(_host, (fn, args, file), nprocs=1, start_method="fork")
        return torch.load(file, weights_only=False)


def _host(index: int, fn: Callable[..., Any], args: tuple[Any, ...], file: Path) -> None:
    from nemo_rl.models.megatron import cpu_shim

    torch.set_num_threads(1)
    cpu_shim.install()
    torch.save(fn(*args), file)


def limit_waits(seconds: float) -> None:
    """Ranks that wait for each other in vain raise after this time, in groups that are made from now on too."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)


__all__ = ["in_host", "limit_waits", "run_ranks"]
