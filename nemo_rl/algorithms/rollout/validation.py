"""Measure the policy on held-out prompts, through the same rollouts as training.

Invariant: the samples of a validation depend on the run's seed and the data only, so two validations of the same
weights give the same numbers, and curves of two runs compare like with like.
"""

from collections.abc import Iterable
from typing import Any

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.metrics import validation_metrics
from nemo_rl.experience.rollouts import RolloutKey, RolloutRunner
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.models.generation.interfaces import SamplingParams


class Validator:
    """Validates on a fixed set of prompts.

    Args:
        batches: collated prompts, iterated anew for every validation.
        runner: plays rollouts.
        sampling: how to sample.
        num_generations: samples per prompt.
        run_seed: seed of the run.
    """

    def __init__(
        self,
        batches: Iterable[BatchedDataDict[Any]],
        runner: RolloutRunner,
        sampling: SamplingParams,
        num_generations: int,
        run_seed: int,
    ):
        self._batches = batches
        self._runner = runner
        self._sampling = sampling
        self._num_generations = num_generations
        self._run_seed = run_seed

    def validate(self) -> tuple[dict[str, float], list[Trajectory]]:
        """Roll out all validation prompts.

        Returns:
            Metrics for the prefix `validation/` and the trajectories.
        """
        trajectories: list[Trajectory] = []
        for index, prompts in enumerate(self._batches):
            key = RolloutKey(self._run_seed, "validation", step=0, round=index)
            batch = self._runner.collect(prompts, self._num_generations, self._sampling, key)
            offset = trajectories[-1].group_index + 1 if trajectories else 0
            for trajectory in batch:
                trajectory.group_index += offset
            trajectories += batch
        return validation_metrics(trajectories, self._num_generations), trajectories
