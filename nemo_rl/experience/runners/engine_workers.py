"""The engines of a runner actor: handles of their workers, which the driver replaces when one dies.

runner: EngineGroup finds a dead engine ─► restart_workers ─► waits
driver: lost_engines ─► replaces the engine, loads its weights ─► replace ─► the runner sends its requests again
"""

import itertools
import secrets
import threading
from collections.abc import Sequence
from typing import Any

from nemo_rl.config import TimeoutsConfig
from nemo_rl.distributed.tensor_transport import pack_tensors
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult
from nemo_rl.utils.errors import DeadlineExceededError, WorkerDiedError

_NO_LIMIT = 2**31
"""Replacements of engines; the driver counts them."""


class EngineWorkers:
    """Takes the place of a `RayWorkerGroup` in the `EngineGroup` of a runner; thread-safe.

    Args:
        workers: actors of the engines' workers, in the order of their ranks.
    """

    def __init__(self, workers: Sequence[Any]) -> None:
        self.workers = list(workers)
        self._changed = threading.Condition()
        self._lost: set[int] = set()

    @property
    def lost(self) -> list[int]:
        """Positions of the workers that have to be replaced."""
        with self._changed:
            return sorted(self._lost)

    def run_single_worker_single_data(self, method_name: str, worker_idx: int, *args: Any) -> Any:
        """Call a method of a worker; see `RayWorkerGroup`."""
        return self.workers[worker_idx].call.remote(method_name, *pack_tensors(args))

    def restart_workers(self, worker_idxs: Sequence[int], timeout_s: float) -> None:
        """Wait until the driver has replaced dead engines.

        Raises:
            DeadlineExceededError: it takes longer than `timeout_s`.
        """
        waited = set(worker_idxs)
        with self._changed:
            self._lost |= waited
            in_time = self._changed.wait_for(lambda: self._lost.isdisjoint(waited), timeout_s)
            self._lost -= waited
        if not in_time:
            raise DeadlineExceededError(
                f"The engine workers {list(worker_idxs)} of this runner were not replaced within {timeout_s:g} s "
                "(cluster.timeouts: setup_s + weight_sync_s)."
            )

    def replace(self, workers: Sequence[Any], lost: Sequence[int]) -> None:
        """Use these actors from now on; those at the positions `lost` are new."""
        with self._changed:
            self.workers[:] = workers
            self._lost -= set(lost)
            self._changed.notify_all()

    def explain_failure(self, error: Exception, worker_idx: int, phase: str) -> Exception:
        """Return the error to show."""
        return WorkerDiedError(f"{self.slot(worker_idx)} failed during {phase}: {error}")

    def activity(self, worker_idxs: Sequence[int]) -> list[tuple[str, float]]:
        """Return nothing: the processes may be on other nodes."""
        return []

    def stacks(self, worker_idxs: Sequence[int]) -> str:
        """Return nothing: the processes may be on other nodes."""
        return ""

    def slot(self, worker_idx: int) -> str:
        """Return the name of a worker."""
        return f"engine worker {worker_idx} of this runner"


class RunnerEngines(EngineGroup):
    """The `EngineGroup` of a runner.

    The ids of its requests differ from those of all other runners, because an engine may still answer requests of a
    runner that died.

    Args:
        workers: workers of its engines.
        workers_per_engine: number of workers of each engine (`EngineSettings.num_workers`).
        timeouts: deadlines.
    """

    def __init__(self, workers: EngineWorkers, workers_per_engine: int, timeouts: TimeoutsConfig) -> None:
        group: Any = workers
        super().__init__(
            group,
            timeouts.setup_s + timeouts.weight_sync_s,
            _NO_LIMIT,
            workers_per_engine=workers_per_engine,
            silence_s=timeouts.engine_silence_s,
        )
        self._ids = itertools.count(secrets.randbits(48))

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See `GenerationInterface.generate`; the answer tells the version of the engines' weights.

        The driver tells it with new groups only, and later turns look for the engine with the newest prefix.
        """
        result = await super().generate(request)
        if result.served_by is not None:
            self.weight_version = result.served_by.weight_version
        return result
