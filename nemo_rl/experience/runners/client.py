"""Let runner actors play groups; the driver's `RolloutRunner` keeps order, deadlines and post-processing.

Each group goes to the runner with the fewest open groups. A runner that dies is started again, and its open groups are
played again: the same prompts with the same seeds. Finished groups outlive it, because the driver owns their
references.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.supervision import SupervisedActor, death_in_short
from nemo_rl.environments.workers.start import Environment
from nemo_rl.experience.closings import Closings
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.idle_shares import BusySeconds
from nemo_rl.experience.rollouts import RolloutKey, RolloutRunner
from nemo_rl.experience.runners.actor import RunnerActor, RunnerSettings, Summary
from nemo_rl.experience.trajectory import Rollouts
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.utils.errors import ConfigError

_POLL_S = 60.0
"""Seconds that a runner waits for the loss of an engine before it answers that none was lost."""
_AFTER_DEATH_S = 1.0
_MOST_GROUPS = 10_000
"""Groups that a runner plays at the same time."""


@dataclass(eq=False)
class _Runner:
    """One runner: its actor, its open groups, and the time with work that it reported last."""

    actor: SupervisedActor
    num_open: int = 0
    busy: BusySeconds = BusySeconds([], 0.0)


class RemoteRunner(RolloutRunner):
    """A `RolloutRunner` whose groups are played by runner actors (`cluster.rollout_runners`).

    Args:
        engines: all engines; their weights are moved here, their requests come from the runners.
        environments: by task name; the driver's own, which correct rewards of whole collections.
        settings: of the runners; each gets its share of the engines.
        num_runners: actors.
        loop: runs the coroutines.
        keeps_texts: as `stored.split`; necessary if an environment corrects rewards of whole collections.

    Raises:
        ConfigError: there are fewer engines than runners.
    """

    def __init__(
        self,
        engines: EngineGroup,
        environments: Mapping[str, Environment],
        settings: RunnerSettings,
        num_runners: int,
        loop: EventLoopThread,
        *,
        keeps_texts: bool,
    ) -> None:
        cluster = settings.cluster
        super().__init__(
            engines, environments, settings.tokenizer, settings.limits, loop, settings.text_rules, cluster.optimizations
        )
        num_engines = len(settings.engines) // settings.workers_per_engine
        if num_runners > num_engines:
            raise ConfigError(
                f"cluster.rollout_runners={num_runners}, but there are {num_engines} engines. Each runner has engines "
                f"of its own: use at most {num_engines} runners."
            )
        self._num_engines = num_engines
        self._engines = engines
        self._keeps_texts = keeps_texts
        self._workers_per_engine = settings.workers_per_engine
        self._num_runners = num_runners
        self._runners = [
            _Runner(_start(str(number), settings, partial(self._share, number))) for number in range(num_runners)
        ]
        self._watches = [
            loop.start(self._replace_engines(number, runner), f"the watch over the engines of rollout runner {number}")
            for number, runner in enumerate(self._runners)
        ]

    async def _play_group(
        self,
        prompts: BatchedDataDict[Any],
        row: int,
        num_generations: int,
        sampling: SamplingParams,
        key: RolloutKey,
        closings: Closings,
    ) -> Rollouts:
        """Let a runner play the samples of one prompt; it closes the episodes."""
        if prompts.get("row_inputs") is not None:
            raise ConfigError(
                "Rollout runners do not take inputs next to the tokens yet. Use cluster.rollout_runners=0."
            )
        runner = min(self._runners, key=lambda each: each.num_open)
        own = replace(key, first_group=key.first_group + row)
        arguments: tuple[Any, ...] = (
            BatchedDataDict(prompts.slice(row, row + 1).data),
            num_generations,
            sampling,
            own,
            self._engines.weight_version,
            self._keeps_texts,
        )
        runner.num_open += 1
        try:
            summary, rows = await _play(runner.actor, arguments)
        finally:
            runner.num_open -= 1
        runner.busy = summary.busy
        for sample in summary.rollouts.trajectories:
            sample.group_index = row
            if sample.stored is not None:
                sample.stored = replace(sample.stored, rows=rows)
        return summary.rollouts

    def _share(self, number: int) -> list[Any]:
        """Return the workers of the engines of a runner: whole engines."""
        workers, size = self._engines.workers.workers, self._workers_per_engine
        engines = [workers[start : start + size] for start in range(0, len(workers), size)]
        return [worker for engine in engines[number :: self._num_runners] for worker in engine]

    async def _replace_engines(self, number: int, runner: _Runner) -> None:
        """Replace engines that a runner finds dead, load the weights, and pass the new actors on; never returns."""
        while True:
            incarnation = runner.actor.running()
            try:
                await runner.actor.until_ready(incarnation)
                if await _answer(incarnation.handle.lost_engine.remote(_POLL_S)):
                    await asyncio.to_thread(self._revive)
                    await _answer(incarnation.handle.replace_engines.remote(self._share(number)))
            except RayActorError:
                await asyncio.sleep(_AFTER_DEATH_S)  # the next group starts it again

    def _revive(self) -> None:
        with self._engines.exclusively():
            if self._engines.revive_dead() and self._engines.load_weights is not None:
                self._engines.load_weights()

    def busy_seconds(self) -> BusySeconds:
        """See `RolloutRunner.busy_seconds`; as the runners reported with their last groups."""
        engines = [seconds for runner in self._runners for seconds in runner.busy.engines]
        unknown = [0.0] * (self._num_engines - len(engines))
        return BusySeconds(engines + unknown, max(runner.busy.environments for runner in self._runners))

    def shutdown(self, timeout_s: float) -> None:
        """Stop the runners and their environments."""
        for watch in self._watches:
            watch.cancel()
        for runner in self._runners:
            runner.actor.shutdown(timeout_s)


def _start(name: str, settings: RunnerSettings, share: Callable[[], list[Any]]) -> SupervisedActor:
    cluster = settings.cluster
    host: Any = ray.remote(RunnerActor)
    options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": _MOST_GROUPS, "scheduling_strategy": "SPREAD"}

    def launch() -> Any:
        return host.options(**options).remote(replace(settings, engines=share()))

    timeouts = cluster.timeouts
    return SupervisedActor(
        name, launch, start_timeout_s=timeouts.setup_s, max_restarts=cluster.max_actor_restarts, kind="rollout runner"
    )


async def _play(actor: SupervisedActor, arguments: Sequence[Any]) -> tuple[Summary, Any]:
    """Play a group in an actor, again if it dies; return the summary and the reference of the tokens."""
    while True:
        incarnation = actor.running()
        try:
            await actor.until_ready(incarnation)
            references: Any = incarnation.handle.play.options(num_returns=2).remote(*arguments)
            answer: Summary = await _answer(references[0])
        except RayActorError as death:
            actor.replace(incarnation, death_in_short(death))
            continue
        except RayTaskError as failure:
            raise failure.cause from failure
        actor.note_answer()
        return answer, references[1]


async def _answer(call: "ray.ObjectRef[Any]") -> Any:
    try:
        return await asyncio.wrap_future(call.future())
    except asyncio.CancelledError:
        ray.cancel(call)
        raise
