"""Let runner actors play groups; the driver's `RolloutRunner` keeps order, deadlines and post-processing.

Each group goes to the runner with the fewest open groups. A runner that dies or hangs is started again, and its open
groups are played again, with the same prompts and the same seeds. Its finished groups are not lost, because the driver
owns the references to their tokens.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.workers.start import Environment
from nemo_rl.experience.closings import Closings
from nemo_rl.experience.event_loop import BackgroundTask, EventLoopThread
from nemo_rl.experience.idle_shares import BusySeconds
from nemo_rl.experience.progress import GroupProgress
from nemo_rl.experience.rollouts import RolloutKey, RolloutRunner
from nemo_rl.experience.runners.actor import RunnerSettings
from nemo_rl.experience.runners.groups import GroupTask
from nemo_rl.experience.runners.share import RunnerShare, ranks_of_runner
from nemo_rl.experience.runners.stored import located, split
from nemo_rl.experience.trajectory import Rollouts
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.utils.errors import ConfigError


class RemoteRunner(RolloutRunner):
    """A `RolloutRunner` whose groups are played by runner actors (`cluster.rollout_runners`).

    Args:
        engines: all engines; the driver moves their weights, and the runners send their requests.
        environments: environments of the driver by task name, which correct rewards of whole collections.
        settings: settings of the runners; each gets its share of the engines.
        num_runners: number of runner actors.
        loop: event loop for the coroutines.

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
    ) -> None:
        cluster = settings.cluster
        super().__init__(
            engines, environments, settings.tokenizer, settings.limits, loop, settings.text_rules, cluster.optimizations
        )
        num_workers, size = len(settings.engines), settings.workers_per_engine
        if num_runners > num_workers // size:
            raise ConfigError(
                f"cluster.rollout_runners={num_runners}, but there are {num_workers // size} engines. Each runner has "
                f"engines of its own: use at most {num_workers // size} runners."
            )
        self._reads_collections = settings.reads_collections
        self._runners = [
            RunnerShare(str(number), engines, ranks_of_runner(number, num_runners, num_workers, size), settings)
            for number in range(num_runners)
        ]
        self._tasks: list[BackgroundTask[None]] = []
        for runner in self._runners:
            self._tasks.append(loop.start(runner.watch(), f"the watch over rollout runner {runner.name}"))
            self._tasks.append(loop.start(runner.exchange.serve(), f"the groups of rollout runner {runner.name}"))

    async def _play_group(
        self,
        prompts: BatchedDataDict[Any],
        row: int,
        num_generations: int,
        sampling: SamplingParams,
        key: RolloutKey,
        closings: Closings,
        progress: GroupProgress | None = None,
    ) -> Rollouts:
        """Let a runner play all samples of one prompt; the runner also closes the episodes."""
        if prompts.get("row_inputs") is not None:
            raise ConfigError(
                "Rollout runners do not take inputs next to the tokens yet. Use cluster.rollout_runners=0."
            )
        runner = min(self._runners, key=lambda each: each.exchange.num_open)
        own = replace(key, first_group=key.first_group + row)
        prompt: Any = BatchedDataDict(prompts.slice(row, row + 1).data)
        rollouts = await runner.exchange.play(GroupTask(prompt, num_generations, sampling, own))
        for sample in rollouts.trajectories:
            sample.group_index = row
        if progress is not None:
            progress.forget()  # a runner plays from the prompt
            progress.rollouts = rollouts
        return rollouts

    def keep(self, rollouts: Rollouts) -> Rollouts:
        """See `RolloutRunner.keep`: the tokens go to the object store."""
        samples, packed = split([rollouts.trajectories], reads_collections=self._reads_collections)
        return located(Rollouts(samples, rollouts.metrics), ray.put(packed))

    def busy_seconds(self) -> BusySeconds:
        """See `RolloutRunner.busy_seconds`; the values are those that the runners reported with their last groups."""
        engines = [seconds for runner in self._runners for seconds in runner.exchange.busy.engines]
        return BusySeconds(engines, max(runner.exchange.busy.environments for runner in self._runners))

    def shutdown(self, timeout_s: float) -> None:
        """Stop the runners and their environments."""
        for task in self._tasks:
            task.cancel()
        for runner in self._runners:
            runner.actor.shutdown(timeout_s)
