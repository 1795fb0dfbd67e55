"""Call a policy's ranks, and join their results.

`RankCalls` allows one thread at a time to call the ranks, with a deadline from `cluster.timeouts` for each call.
Invariants: all ranks get calls in the same order. A thread that holds the ranks, such as a weight stream, never sees
half-updated weights.

Log-probabilities of stored rows stay in the object store like the rows:

    rank: whole ─► scores ─► keep ─► object store ──────────────────────────────► rank: whole
                              └────► references, errors ─► driver: of_rows ─────────┘

`make_portable` makes a loss from a user's file usable in the workers. Classes are pickled as "module and name", so a
worker has to import the module. It can import installed packages, but not a file next to a script on another node.
Invariant: code outside of installed packages is pickled with the loss. All other code is pickled by name.
"""

import logging
import math
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
import torch
from ray import cloudpickle
from ray.exceptions import RayError
from torch import Tensor

from nemo_rl.config import TimeoutsConfig
from nemo_rl.distributed.named_sharding import REPLICATED_AXES
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.worker_groups import MultiWorkerFuture, RayWorkerGroup
from nemo_rl.losses.loss_function import AnyLossFunction
from nemo_rl.models.batch_rows import Kept, StoredScores
from nemo_rl.models.policy.batching import ShardedBatch
from nemo_rl.models.policy.interfaces import TrainResult
from nemo_rl.models.policy.workers.costs import PassCosts, PassKind, WorkCount
from nemo_rl.models.policy.workers.loss_calls import join_updates, reduce_metrics
from nemo_rl.models.policy.workers.rank import UpdateResult
from nemo_rl.models.training.tensor_checks import listed
from nemo_rl.utils.errors import DeadlineExceededError, NemoRLError

_DESCRIPTION_S = 60.0
"""Time limit in seconds for making a model without memory and counting its operations."""


class RankCalls:
    """Call methods of the ranks and wait for the results. If a rank raises an error or dies, its error is raised.

    Args:
        layout: Defines which rows a rank gets, and which ranks return results.
    """

    def __init__(self, workers: RayWorkerGroup, layout: ParallelLayout, timeouts: TimeoutsConfig) -> None:
        self._workers = workers
        self._layout = layout
        self._timeouts = timeouts
        self.work = WorkCount(self._describe_passes)
        """Counter of the passes over rows so far."""
        self._turn = threading.RLock()
        self._num_ended = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Prevent other threads from calling the ranks. The same thread may enter again.

        An update of several global batches may take long, but each of its calls has a deadline.

        Raises:
            DeadlineExceededError: Another thread holds the ranks, and none of its calls has ended within the longest
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
        """Call a method on every rank with its data-parallel rank's rows, and return results in that order."""
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
        """Call a method on every rank with the same arguments. `phase` names the work in messages."""
        with self.held():
            future = self._workers.run_all_workers_single_data(method, **kwargs)
            return self._answers(future, phase, self._timeouts.checkpoint_s)

    def _describe_passes(self) -> PassCosts:
        """Return the costs of passes over rows from the first rank, or unknown costs with the reason."""
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


logger = logging.getLogger(__name__)


def join_ranks(parts: list[UpdateResult], valid: tuple[float, float], eval_mode: bool) -> dict[str, float]:
    """Join the metrics of one update over all ranks."""
    joined = reduce_metrics([part.metrics for part in parts]) | parts[0].model_metrics
    joined["loss"] = sum(part.loss for part in parts)
    joined["global_valid_seqs"], joined["global_valid_toks"] = valid
    if not eval_mode:
        joined["lr"] = parts[0].lr
        joined["grad_norm"] = parts[0].grad_norm
        joined["skipped_updates"] = float(parts[0].skipped)
        joined["num_updates"] = float(not parts[0].skipped)
        _warn_of_values(joined, parts[0])
    return joined


def _warn_of_values(update: dict[str, float], rank: UpdateResult) -> None:
    """Warn on the driver if an update's loss, gradient or learning rate is not finite, naming the tensors."""
    numbers = {name: update[name] for name in ("loss", "grad_norm", "lr")}
    if not rank.skipped and all(map(math.isfinite, numbers.values())):
        return
    said = ", ".join(f"{name}={value:g}" for name, value in numbers.items())
    names = f"; not finite: {listed(rank.not_finite)}" if rank.not_finite else ""
    end = "This update is skipped: weights and optimizer are unchanged." if rank.skipped else "The update was made."
    logger.warning("An update is not finite (%s%s). %s", said, names, end)


def train_result(updates: list[dict[str, float]], loss_fn: AnyLossFunction) -> TrainResult:
    """Build the result of all global batches. Skipped batches have loss and gradient norm 0."""
    made = [update for update in updates if update]
    num_skipped = len(updates) - len(made)
    none_made = {} if made else {"num_updates": 0.0}
    metrics = {"global_valid_seqs": 0.0, "global_valid_toks": 0.0, **none_made} | join_updates(made, loss_fn)
    if num_skipped:
        logger.warning(
            "%d of %d updates were skipped: none of their tokens counts in the loss.", num_skipped, len(updates)
        )
        metrics["skipped_updates"] = metrics.get("skipped_updates", 0.0) + num_skipped
    names = list(dict.fromkeys(name for update in made for name in update))
    return TrainResult(
        loss=torch.tensor([update.get("loss", 0.0) for update in updates]),
        grad_norm=torch.tensor([update.get("grad_norm", 0.0) for update in updates]),
        metrics=metrics,
        all_mb_metrics={name: [u[name] for u in made if name in u] for name in names},
    )


def join_layers(of_stages: list[tuple[list[str], list[torch.Tensor]]]) -> tuple[list[str], list[torch.Tensor]]:
    """Join the layers of all pipeline stages in the order of layer numbers. A stage may have several chunks."""
    layers = [pair for names, outputs in of_stages for pair in zip(names, outputs, strict=True)]
    if len(of_stages) > 1:
        # # Imported here, because it imports torch.distributed.tensor and its dependencies.
        from transformers.core_model_loading import dot_natural_key

        layers.sort(key=lambda pair: dot_natural_key(pair[0]))
    return [name for name, _ in layers], [output for _, output in layers]


def of_rows(sharded: ShardedBatch, kept: Sequence[Kept]) -> tuple[list[StoredScores | None], Tensor]:
    """Return references of the scores and the errors `[B]` float32, in the order of the batch's rows."""
    scores = [StoredScores(part.scores, start) for part in kept for start in part.starts]
    order = [int(position) for position in sharded.plan.restore_order[: sharded.num_rows]]
    return [scores[position] for position in order], sharded.restore([part.errors_B for part in kept])


_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_INSTALLED = tuple(Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib"))


def make_portable(loss_fn: Any) -> None:
    """Register the modules of `loss_fn`, its class and its base classes for pickling by value."""
    definers = [loss_fn, *type(loss_fn).__mro__]
    names = {getattr(definer, "__module__", None) for definer in definers}
    for name in names:
        module = sys.modules.get(name) if name is not None else None
        if module is not None and _is_users_own(module):
            cloudpickle.register_pickle_by_value(module)


def _is_users_own(module: ModuleType) -> bool:
    """Return whether a module belongs to the user, so that a worker may not find it."""
    file = getattr(module, "__file__", None)
    if module.__name__ == "__main__" or file is None:
        return False
    path = Path(file).resolve()
    return not any(path.is_relative_to(root) for root in (_PACKAGE_ROOT, *_INSTALLED))
