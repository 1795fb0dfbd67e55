"""Play groups in an actor: the library's `RolloutRunner`, next to engines and environments of its own.

    driver: client.RemoteRunner ── play(prompt) ──► RunnerActor: RolloutRunner.play_group ─► engines, environments
            summaries ◄───────────────────────────────┤
            references ◄── object store ◄── tokens ───┘

Invariant: an engine gets requests from one runner only, because its results are collected once.
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
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.tensor_transport import pack_tensors
from nemo_rl.distributed.workers.process import ProcessIdentity, this_process
from nemo_rl.environments.user_environments import environment_of, start_environment
from nemo_rl.environments.workers.loading import extend_path
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.idle_shares import BusySeconds
from nemo_rl.experience.penalties.review import ReviewSettings
from nemo_rl.experience.rollouts import RolloutKey, RolloutLimits, RolloutRunner
from nemo_rl.experience.runners.engine_workers import EngineWorkers, RunnerEngines
from nemo_rl.experience.runners.stored import split
from nemo_rl.experience.trajectory import Rollouts, Trajectory
from nemo_rl.models.generation.interfaces import SamplingParams

_LOOK_S = 0.1
"""Seconds between two looks for lost engines."""


@dataclass(frozen=True)
class RunnerSettings:
    """Settings of a runner actor.

    Attributes:
        engines: actors of its engines' workers, in the order of their ranks.
        workers_per_engine: as `EngineSettings.num_workers`.
        environments: class path and section of `env` by task name.
        cluster: deadlines, restarts, Python environments.
        tokenizer: of rollouts.
        limits: bounds of rollouts.
        text_rules: as `RolloutRunner`.
        import_path: folders that the driver searches for modules.
        review: what is noted on finished samples.
    """

    engines: Sequence[Any]
    workers_per_engine: int
    environments: Mapping[str, tuple[str, dict[str, Any]]]
    cluster: ClusterConfig
    tokenizer: PreTrainedTokenizerBase
    limits: RolloutLimits
    text_rules: TextRules
    import_path: Sequence[str]
    review: ReviewSettings = field(default_factory=ReviewSettings)


@dataclass(frozen=True)
class Summary:
    """The part of a group that the driver gets.

    Attributes:
        rollouts: the samples without their tokens, and the metrics of environments; whole samples for a validation.
        busy: time with work of the runner's engines and environments since its start.
    """

    rollouts: Rollouts
    busy: BusySeconds


class RunnerActor:
    """Plays groups on the actor's event loop; see the module."""

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

    def ready(self) -> ProcessIdentity:
        """Return the actor's process, once the runner is built."""
        return this_process()

    async def play(
        self,
        prompt: BatchedDataDict[Any],
        num_generations: int,
        sampling: SamplingParams,
        key: RolloutKey,
        reads_collections: bool,
        weight_version: int,
    ) -> tuple[Summary, PackedRows | None]:
        """Play the group of one prompt.

        Args:
            prompt: one collated row.
            num_generations: samples.
            sampling: how to sample.
            key: as `RolloutRunner.play_group`.
            reads_collections: as `stored.split`.
            weight_version: version of the engines' weights.

        Returns:
            The summary, and the tokens with the texts; None for a validation, whose samples the driver gets whole.

        Raises:
            WorkerDiedError: an engine died, or an environment cannot be kept running.
            Exception: as `RolloutRunner.play_group`.
        """
        self._engines.weight_version = weight_version
        played = await self._runner.play_group(prompt, 0, num_generations, sampling, key)
        busy = self._runner.busy_seconds()
        if key.phase != "train":
            return Summary(Rollouts([_sent(sample) for sample in played.trajectories], played.metrics), busy), None
        samples, packed = split(played.trajectories, reads_collections=reads_collections)
        return Summary(Rollouts(samples, played.metrics), busy), packed

    async def lost_engines(self, timeout_s: float) -> list[int]:
        """Wait until engines have to be replaced; the driver also takes the answer as a sign of life.

        Returns:
            Positions of their workers in `RunnerSettings.engines`; empty if there are none after `timeout_s`.
        """
        end = time.monotonic() + timeout_s
        while not (lost := self._workers.lost) and time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)
        return lost

    async def replace_engines(self, workers: Sequence[Any], lost: Sequence[int]) -> None:
        """Take the current workers; those at the positions `lost` are new and have the current weights."""
        self._workers.replace(workers, lost)

    def shutdown(self) -> None:
        """Stop the environments."""
        self._resources.close()


def _sent(sample: Trajectory) -> Trajectory:
    """Prepare the tensors of a whole sample for sending."""
    for conversation in sample.conversations:
        conversation.message_log = pack_tensors([dict(message) for message in conversation.message_log])
    sample.episode = None
    return sample
