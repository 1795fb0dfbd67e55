"""Sample groups in an actor, which has its own `RolloutRunner`, engines and environments.

    driver: client.RemoteRunner ── prompts ──► RunnerActor: RolloutRunner.play_group ─► engines, environments
            summaries ◄──────────────────────────┤
            references ◄── object store ◄─ tokens┘

Invariant: an engine gets requests from one runner only, because each result of an engine can be collected only once.
"""

import asyncio
import itertools
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.config import ClusterConfig, TimeoutsConfig
from nemo_rl.data.messages.content import TextRules
from nemo_rl.distributed.tensor_transport import pack_tensors
from nemo_rl.distributed.workers.process import ProcessIdentity, this_process
from nemo_rl.environments.user_environments import environment_of, start_environment
from nemo_rl.environments.workers.loading import extend_path
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.penalties import ReviewSettings
from nemo_rl.experience.rollouts import RolloutLimits, RolloutRunner
from nemo_rl.experience.runners.groups import FinishedGroups, GroupTask, OpenGroups, for_driver
from nemo_rl.experience.trajectory import Rollouts
from nemo_rl.models.batch_rows import PackedRows
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult
from nemo_rl.utils.errors import DeadlineExceededError, WorkerDiedError

_NO_LIMIT = 2**31
"""Limit of engine replacements in a runner. It is not reached, because the driver has the effective limit."""


class EngineWorkers:
    """Thread-safe replacement for the `RayWorkerGroup` in the `EngineGroup` of a runner.

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
        """Call a method of a worker, as `RayWorkerGroup` does."""
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
        """Use the given actors from now on. The actors at the positions `lost` are new."""
        with self._changed:
            self.workers[:] = workers
            self._lost -= set(lost)
            self._changed.notify_all()

    def explain_failure(self, error: Exception, worker_idx: int, phase: str) -> Exception:
        """Return the error that is raised for a failed call."""
        return WorkerDiedError(f"{self.slot(worker_idx)} failed during {phase}: {error}")

    def activity(self, worker_idxs: Sequence[int]) -> list[tuple[str, float]]:
        """Return nothing, because the processes may be on other nodes."""
        return []

    def stacks(self, worker_idxs: Sequence[int]) -> str:
        """Return an empty text, because the processes may be on other nodes."""
        return ""

    def slot(self, worker_idx: int) -> str:
        """Return the name of a worker."""
        return f"engine worker {worker_idx} of this runner"


class RunnerEngines(EngineGroup):
    """The `EngineGroup` of a runner.

    Request ids differ from those of all other runners, because an engine may still answer requests of a runner that
    died.

    Args:
        workers_per_engine: number of workers of each engine (`EngineSettings.num_workers`).
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
        """Generate, and store the version of the engines' weights that the answer contains.

        The driver sends it only with new groups, and later turns need it to find the engine with the newest prefix.
        """
        result = await super().generate(request)
        if result.served_by is not None:
            self.weight_version = result.served_by.weight_version
        return result


_LOOK_S = 0.1
"""Seconds between two checks for lost engines."""


@dataclass(frozen=True)
class RunnerSettings:
    """Settings of a runner actor."""

    engines: Sequence[Any]
    """Actors of the workers of its engines, in the order of their ranks."""
    workers_per_engine: int
    """Number of workers of each engine (`EngineSettings.num_workers`)."""
    environments: Mapping[str, tuple[str, dict[str, Any]]]
    """Class path and section of `env`, by task name."""
    cluster: ClusterConfig
    """Section with time limits, restarts and Python environments."""
    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of the rollouts."""
    limits: RolloutLimits
    text_rules: TextRules
    """Rules for texts, as in `RolloutRunner`."""
    import_path: Sequence[str]
    """Folders in which the driver searches for modules."""
    reads_collections: bool
    """Whether an environment reads whole collections (`stored.split`)."""
    review: ReviewSettings = field(default_factory=ReviewSettings)
    """Settings of the review of finished samples."""


class RunnerActor:
    """Actor that samples groups on its event loop. The module's docstring shows its calls."""

    def __init__(self, settings: RunnerSettings) -> None:
        extend_path(settings.import_path)
        self._resources = ExitStack()
        cluster, timeouts = settings.cluster, settings.cluster.timeouts
        environments = {
            name: start_environment(environment_of(name, path), section, cluster, self._resources)
            for name, (path, section) in settings.environments.items()
        }
        self._workers = EngineWorkers(settings.engines)
        self._engines = RunnerEngines(self._workers, settings.workers_per_engine, timeouts)
        self._loop = EventLoopThread()
        self._runner = RolloutRunner(
            self._engines,
            environments,
            settings.tokenizer,
            settings.limits,
            self._loop,
            settings.text_rules,
            cluster.optimizations,
            settings.review.make(settings.tokenizer),
            cluster.agent_endpoint,
        )
        self._reads_collections = settings.reads_collections
        self._groups = OpenGroups(self._play)

    def ready(self) -> ProcessIdentity:
        """Return the identity of the actor's process as soon as the runner is ready."""
        return this_process()

    async def submit(
        self, tasks: Sequence[tuple[int, GroupTask]], given_up: Sequence[int], weight_version: int
    ) -> None:
        """Begin to sample some groups, and end other groups.

        Args:
            tasks: the groups to sample, each with its number.
            given_up: numbers of the groups to end, because no caller waits for them.
        """
        self._engines.weight_version = weight_version
        for number in given_up:
            self._groups.give_up(number)
        for number, task in tasks:
            self._groups.start(number, task)

    async def collect(self, timeout_s: float) -> tuple[FinishedGroups, PackedRows | None]:
        """Wait up to `timeout_s` for finished groups.

        Returns:
            The finished groups, which may be none, and the tokens and texts of training groups. The tokens and texts
            stay in the object store.
        """
        taken = await self._groups.take(timeout_s)
        groups, packed = for_driver(taken, reads_collections=self._reads_collections)
        return FinishedGroups(groups, self._runner.busy_seconds()), packed

    async def _play(self, task: GroupTask) -> Rollouts:
        return await self._runner.play_group(task.prompt, 0, task.num_generations, task.sampling, task.key)

    async def lost_engines(self, timeout_s: float) -> list[int]:
        """Wait up to `timeout_s` for engines that have to be replaced. The answer also shows that the actor works.

        Returns:
            Positions of the engines' workers in `RunnerSettings.engines`, or an empty list.
        """
        end = time.monotonic() + timeout_s
        while not (lost := self._workers.lost) and time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)
        return lost

    async def replace_engines(self, workers: Sequence[Any], lost: Sequence[int]) -> None:
        """Use the given workers from now on. Workers at the positions `lost` are new and have the current weights."""
        self._workers.replace(workers, lost)

    def shutdown(self) -> None:
        """Stop the environments."""
        self._resources.close()
