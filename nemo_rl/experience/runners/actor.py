"""Play groups in an actor, which has its own `RolloutRunner`, engines and environments.

    driver: client.RemoteRunner ── prompts ──► RunnerActor: RolloutRunner.play_group ─► engines, environments
            summaries ◄──────────────────────────┤
            references ◄── object store ◄─ tokens┘

Invariant: an engine gets requests from one runner only, because each of its results can be collected only once.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.config import ClusterConfig
from nemo_rl.data.messages.content import TextRules
from nemo_rl.data.stored_rows import PackedRows
from nemo_rl.distributed.workers.process import ProcessIdentity, this_process
from nemo_rl.environments.user_environments import environment_of, start_environment
from nemo_rl.environments.workers.loading import extend_path
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.penalties.review import ReviewSettings
from nemo_rl.experience.rollouts import RolloutLimits, RolloutRunner
from nemo_rl.experience.runners.engine_workers import EngineWorkers, RunnerEngines
from nemo_rl.experience.runners.groups import FinishedGroups, GroupTask, OpenGroups, for_driver
from nemo_rl.experience.trajectory import Rollouts

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
    """Section with deadlines, restarts and Python environments."""
    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of the rollouts."""
    limits: RolloutLimits
    text_rules: TextRules
    """Rules for texts, as in `RolloutRunner`."""
    import_path: Sequence[str]
    """Folders in which the driver searches for modules."""
    reads_collections: bool
    """As in `stored.split`; true if an environment corrects rewards of whole collections."""
    review: ReviewSettings = field(default_factory=ReviewSettings)
    """Checks of finished samples, whose results are noted on them."""


class RunnerActor:
    """Plays groups on the event loop of the actor; the module's docstring shows the calls."""

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
        """Return the process of the actor; it answers when the runner is ready."""
        return this_process()

    async def submit(
        self, tasks: Sequence[tuple[int, GroupTask]], given_up: Sequence[int], weight_version: int
    ) -> None:
        """Begin to play groups, and end others.

        Args:
            tasks: the groups to play, each with its number.
            given_up: numbers of the groups to end, because no caller waits for them.
            weight_version: version of the engines' weights.
        """
        self._engines.weight_version = weight_version
        for number in given_up:
            self._groups.give_up(number)
        for number, task in tasks:
            self._groups.start(number, task)

    async def collect(self, timeout_s: float) -> tuple[FinishedGroups, PackedRows | None]:
        """Wait up to `timeout_s` for finished groups.

        Returns:
            The finished groups, of which there may be none; and the tokens and texts of those to train on, which stay
            in the object store.
        """
        taken = await self._groups.take(timeout_s)
        groups, packed = for_driver(taken, reads_collections=self._reads_collections)
        return FinishedGroups(groups, self._runner.busy_seconds()), packed

    async def _play(self, task: GroupTask) -> Rollouts:
        return await self._runner.play_group(task.prompt, 0, task.num_generations, task.sampling, task.key)

    async def lost_engines(self, timeout_s: float) -> list[int]:
        """Wait up to `timeout_s` for engines that have to be replaced; the answer also shows that the actor works.

        Returns:
            Positions of their workers in `RunnerSettings.engines`; empty if there are none.
        """
        end = time.monotonic() + timeout_s
        while not (lost := self._workers.lost) and time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)
        return lost

    async def replace_engines(self, workers: Sequence[Any], lost: Sequence[int]) -> None:
        """Use these workers from now on; those at the positions `lost` are new and have the current weights."""
        self._workers.replace(workers, lost)

    def shutdown(self) -> None:
        """Stop the environments."""
        self._resources.close()
