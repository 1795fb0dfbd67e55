"""Call a policy's ranks, one thread at a time, with a deadline from `cluster.timeouts` for each call.

Invariant: all ranks get calls in the same order, and a thread that holds the ranks, such as a weight stream, never sees
half-updated weights.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import ray
from ray.exceptions import RayError

from nemo_rl.config import TimeoutsConfig
from nemo_rl.distributed.named_sharding import REPLICATED_AXES
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.worker_groups import MultiWorkerFuture, RayWorkerGroup
from nemo_rl.models.policy.batching import ShardedBatch
from nemo_rl.models.policy.work import PassKind, WorkCount
from nemo_rl.models.policy.workers.costs import PassCosts
from nemo_rl.utils.errors import DeadlineExceededError, NemoRLError

_DESCRIPTION_S = 60.0
"""Seconds to make a model without memory and count its operations."""


class RankCalls:
    """Calls methods of the ranks and waits for the results; if a rank raises or dies, the call raises its error.

    Args:
        layout: which rows a rank gets, and whose results count.
        timeouts: deadlines.
    """

    def __init__(self, workers: RayWorkerGroup, layout: ParallelLayout, timeouts: TimeoutsConfig) -> None:
        self._workers = workers
        self._layout = layout
        self._timeouts = timeouts
        self.work = WorkCount(self._describe_passes)
        """The passes over rows so far."""
        self._turn = threading.RLock()
        self._num_ended = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other threads from calling the ranks; the same thread may nest it.

        An update of several global batches may take long, but each of its calls has a deadline.

        Raises:
            DeadlineExceededError: another thread holds the ranks, and none of its calls has ended within the longest
                deadline of a call.
        """
        longest, num_ended = max(self._timeouts.train_s, self._timeouts.checkpoint_s), -1
        while not self._turn.acquire(timeout=longest):
            if num_ended == self._num_ended:
                raise DeadlineExceededError(
                    f"Another thread has held the policy, without a call of its ranks that ended, for more than "
                    f"{longest:g} s (cluster.timeouts: train_s, checkpoint_s)."
                )
            num_ended = self._num_ended
        try:
            yield
        finally:
            self._turn.release()

    def with_rows(self, method: str, sharded: ShardedBatch, **common: Any) -> list[Any]:
        """Call a method on every rank with the rows of its data-parallel rank; return results in that order."""
        with self.held(), self._counted(method, sharded, is_counted=not common.get("eval_mode")):
            future = self._workers.run_all_workers_sharded_data(
                method,
                in_sharded_axes=["data_parallel"],
                replicate_on_axes=list(REPLICATED_AXES),
                return_from_workers=self._layout.result_ranks,
                common_kwargs=common,
                data=sharded.data,
                sizes=sharded.sizes,
            )
            return self._answers(future, f"policy {method}")

    def everywhere(self, method: str, phase: str, **kwargs: Any) -> list[Any]:
        """Call a method on every rank with the same arguments; `phase` names the work in messages."""
        with self.held():
            future = self._workers.run_all_workers_single_data(method, **kwargs)
            return self._answers(future, phase, self._timeouts.checkpoint_s)

    def _describe_passes(self) -> PassCosts:
        """Return what passes over rows cost, as the first rank finds out; a failure is the answer's reason."""
        try:
            call = self._workers.run_single_worker_single_data("describe_passes", 0)
            costs: PassCosts = ray.get(call, timeout=_DESCRIPTION_S)
        except (RayError, NemoRLError) as error:
            return PassCosts(None, None, " ".join(str(error).split())[-200:], is_failure=True)
        return costs

    def _counted(self, method: str, sharded: ShardedBatch, *, is_counted: bool) -> AbstractContextManager[None]:
        if not is_counted:
            return nullcontext()
        kind: PassKind = "training" if method == "train" else "scoring"
        return self.work.of(kind, sharded.lengths(), sharded.num_shared_tokens)

    def _answers(self, future: MultiWorkerFuture, phase: str, timeout_s: float | None = None) -> list[Any]:
        answers = self._workers.get_all_worker_results(future, timeout_s=timeout_s, phase=phase)
        self._num_ended += 1
        return answers
