"""Run tests of Megatron Core in ranks: forks of one process that has imported it and is prepared for the CPU.

The import takes seconds, and what `replace_cuda` patches must not reach the process of the tests.
"""

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from policy_helpers import run_ranks
from transformers.utils.logging import disable_progress_bar

needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed (extra mcore)"
)


class Host:
    """The process that has imported Megatron Core; one serves all tests of a session."""

    def __init__(self) -> None:
        fork = multiprocessing.get_context("fork")
        self._here, there = fork.Pipe()
        self._process = fork.Process(target=_serve, args=(there, self._here), daemon=False)
        self._process.start()
        there.close()

    def run(self, fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
        """Return what `fn(rank, num_ranks, *args)` returns, by rank."""
        self._here.send((fn, num_ranks, args))
        worked, result = self._here.recv()
        assert worked, result
        return result

    def stop(self) -> None:
        self._here.send(None)
        self._process.join(timeout=5)
        self._process.kill()  # a rank that failed may keep it waiting


def _serve(pipe: Any, other_end: Any) -> None:
    from nemo_rl.models.megatron import parallel

    other_end.close()  # so that the end of the test process is noticed here
    torch.set_num_threads(1)
    disable_progress_bar()
    parallel.replace_cuda()
    while asked := _asked(pipe):
        fn, num_ranks, args = asked
        try:
            pipe.send((True, run_ranks(fn, num_ranks, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _asked(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None


def limit_waits(seconds: float) -> None:
    """Make ranks that wait in vain raise after this time, also in groups that are made later."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)
