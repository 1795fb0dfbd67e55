"""Join passes of several models that wait for the ranks at the same time.

    run, run, run ─► those with the same loss ─► one call of the ranks ─► the result of each

Invariant: a pass that waits alone is computed alone, with the bits that it always has.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.workers.adapter_rank import NamedLoss, Refusal
from nemo_rl.serving.interfaces import RequestError

GATHER_S = 0.02
"""Time in seconds for which a pass waits for others. Programs whose passes have ended together send the next ones."""
type Results = Mapping[str, tuple[float, Tensor] | Refusal]
type RunPasses = Callable[[Mapping[str, BatchedDataDict[Any]], NamedLoss, bool], Awaitable[Results]]
"""Function from the rows of each adapter, their loss, and whether gradients are wanted, to the results of all."""


@dataclass(frozen=True, eq=False)
class _WaitingPass:
    adapter: str
    rows: BatchedDataDict[Any]
    loss: NamedLoss
    backward: bool
    result: "asyncio.Future[tuple[float, Tensor]]"

    def joins(self, first: "_WaitingPass") -> bool:
        return self.loss == first.loss and self.backward == first.backward


class PassQueue:
    """Passes that wait for the ranks.

    Args:
        run_passes: computes passes of several adapters with one loss.
        most: largest number of passes that are computed together.
    """

    def __init__(self, run_passes: RunPasses, most: int) -> None:
        self._run_passes = run_passes
        self._most = most
        self._waiting: list[_WaitingPass] = []
        self._worker: asyncio.Task[None] | None = None

    async def run(
        self, adapter: str, rows: BatchedDataDict[Any], loss: NamedLoss, *, backward: bool
    ) -> tuple[float, Tensor]:
        """Compute a pass, and return the sum of its loss and the log-probabilities of its targets.

        Raises:
            RequestError: its loss or gradient is not finite. Other passes of the same call are not concerned.
        """
        result = asyncio.get_running_loop().create_future()
        self._waiting.append(_WaitingPass(adapter, rows, loss, backward, result))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        found: tuple[float, Tensor] = await result
        return found

    async def _work(self) -> None:
        """Compute what waits, until nothing does."""
        while self._waiting:
            if self._most > 1:
                await asyncio.sleep(GATHER_S)
            group = [each for each in self._waiting if each.joins(self._waiting[0])][: self._most]
            self._waiting = [each for each in self._waiting if each not in group]
            await self._compute(group)

    async def _compute(self, group: list[_WaitingPass]) -> None:
        """Compute passes together, and give each its result or its error."""
        first = group[0]
        work = asyncio.ensure_future(
            self._run_passes({each.adapter: each.rows for each in group}, first.loss, first.backward)
        )
        await asyncio.wait({work})
        error = work.exception()
        for each in group:
            found = error or work.result()[each.adapter]
            if each.result.done():
                continue  # its caller has given up
            if isinstance(found, Refusal):
                each.result.set_exception(RequestError(found.reason))
            elif isinstance(found, BaseException):
                each.result.set_exception(found)
            else:
                each.result.set_result(found)
