"""Join the samples that wait for a model into as few forward passes as possible.

    step() of each sample ── score() ──► waiting ──► one pass at a time, on a thread ──► the score of each sample

A sample waits `wait_s` for others if no pass runs; while one runs, all samples that arrive wait for the next.
Invariant: each sample gets its own score or an error; if a pass raises, each of its samples is scored alone, so that
one that cannot be scored costs no other.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False)
class _Waiting:
    row: Tensor
    score: "asyncio.Future[float]"


class JoinedPasses:
    """Scores rows of tokens together.

    Args:
        scores: computes the score of each row; called by one thread at a time.
        wait_s: seconds that a row waits for others.
        largest: most rows of a pass.
    """

    def __init__(self, scores: Callable[[Sequence[Tensor]], list[float]], wait_s: float, largest: int) -> None:
        self._scores = scores
        self._wait_s = wait_s
        self._largest = largest
        self._waiting: list[_Waiting] = []
        self._worker: asyncio.Task[None] | None = None
        self.num_passes = 0
        """Calls of `scores`."""
        self.num_rows = 0
        """Rows scored by them."""

    async def score(self, row: Tensor) -> float:
        """Return the score of a row of tokens, [T] int64.

        Raises:
            Exception: whatever `scores` raises for this row alone.
        """
        waiting = _Waiting(row, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await waiting.score

    async def _work(self) -> None:
        """Make passes until no row waits."""
        await asyncio.sleep(self._wait_s)
        while self._waiting:
            batch, self._waiting = self._waiting[: self._largest], self._waiting[self._largest :]
            wanted = [waiting for waiting in batch if not waiting.score.done()]
            if wanted:
                await self._pass(wanted)

    async def _pass(self, batch: list[_Waiting]) -> None:
        """Score rows together; if that fails, one by one."""
        self.num_passes += 1
        self.num_rows += len(batch)
        try:
            scores = await asyncio.to_thread(self._scores, [waiting.row for waiting in batch])
        except Exception as error:  # relay: each waiting sample gets the error of its own row
            if len(batch) > 1:
                for waiting in batch:
                    await self._pass([waiting])
            elif not batch[0].score.done():
                batch[0].score.set_exception(error)
            return
        for waiting, score in zip(batch, scores, strict=True):
            if not waiting.score.done():
                waiting.score.set_result(score)
