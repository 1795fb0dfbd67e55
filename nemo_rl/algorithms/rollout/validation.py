"""Measure the policy on held-out prompts, through the same rollouts as training.

Invariant: the samples of a validation depend on the run's seed and the data only, so two validations of the same
weights give the same numbers, and curves of two runs compare like with like.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.metrics import mean_metrics, validation_metrics
from nemo_rl.experience.rollouts import RolloutKey, RolloutRunner
from nemo_rl.experience.trajectory import Rollouts, Trajectory
from nemo_rl.models.generation.interfaces import SamplingParams


@dataclass(frozen=True)
class Validator:
    """Validates on a fixed set of prompts.

    Attributes:
        batches: collated prompts, iterated again for every validation.
        runner: plays rollouts.
        sampling: how to sample.
        num_generations: samples per prompt.
        run_seed: seed of the run.
        tasks: names of the run's environments; several of them have their own metrics.
    """

    batches: Iterable[BatchedDataDict[Any]]
    runner: RolloutRunner
    sampling: SamplingParams
    num_generations: int
    run_seed: int
    tasks: Collection[str] = ()

    def validate(self) -> tuple[dict[str, float], list[Trajectory]]:
        """Roll out all validation prompts.

        Returns:
            Metrics for the prefix `validation/` and the trajectories.
        """
        trajectories: list[Trajectory] = []
        collections: list[Rollouts] = []
        for index, prompts in enumerate(self.batches):
            key = RolloutKey(self.run_seed, "validation", step=0, round=index)
            collections.append(self.runner.collect(prompts, self.num_generations, self.sampling, key))
            batch = collections[-1].trajectories
            offset = trajectories[-1].group_index + 1 if trajectories else 0
            for trajectory in batch:
                trajectory.group_index += offset
            trajectories += batch
        metrics = mean_metrics(collections) | validation_metrics(trajectories, self.num_generations)
        return metrics | self._by_environment(trajectories), trajectories

    def _by_environment(self, trajectories: list[Trajectory]) -> dict[str, float]:
        """Compute the metrics of each environment, as `<environment>/<name>`, where there are several."""
        metrics: dict[str, float] = {}
        for task in self.tasks if len(self.tasks) > 1 else ():
            own = [t for t in trajectories if t.task_name == task]
            found = validation_metrics(own, self.num_generations) if own else {}
            metrics |= {f"{task}/{name}": value for name, value in found.items()}
        return metrics
