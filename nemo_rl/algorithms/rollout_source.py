"""Where a training step's trajectories come from.

A source pulls prompts and returns graded trajectories. Variants wrap each other instead of adding branches to the loop:
`DynamicSampling` wraps `FreshRollouts`. Invariant: a source returns exactly `num_prompts_per_step` groups, or says why
it cannot.
"""

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.metrics import mean_metrics
from nemo_rl.experience.prompt_stream import DataExhausted
from nemo_rl.experience.rollouts import RolloutKey, RolloutRunner
from nemo_rl.experience.trajectory import Rollouts, Trajectory
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.utils.errors import NothingToLearnError

logger = logging.getLogger(__name__)


PromptSource = Callable[[], BatchedDataDict[Any]]
"""Gives the next batch of prompts; raises `prompt_stream.DataExhausted` after the last epoch."""


class RolloutSource(Protocol):
    """Gives a step its experience."""

    def collect(self, step: int) -> Rollouts:
        """Trajectories for training step `step` (from 1)."""


class FreshRollouts:
    """Samples the next batch of prompts with the current weights.

    Args:
        next_prompts: the data.
        runner: plays rollouts.
        sampling: how to sample.
        num_generations: samples per prompt.
        run_seed: seed of the run.
    """

    def __init__(
        self,
        next_prompts: PromptSource,
        runner: RolloutRunner,
        sampling: SamplingParams,
        num_generations: int,
        run_seed: int,
    ):
        self._next_prompts = next_prompts
        self._runner = runner
        self._sampling = sampling
        self._num_generations = num_generations
        self._run_seed = run_seed

    def collect(self, step: int, round_index: int = 0) -> Rollouts:
        """See `RolloutSource.collect`; `round_index` tells repeated collections of a step apart."""
        key = RolloutKey(self._run_seed, "train", step, round_index)
        return self._runner.collect(self._next_prompts(), self._num_generations, self._sampling, key)


class DynamicSampling:
    """DAPO's dynamic sampling (Yu et al. 2025, section 3.2): only groups whose rewards differ teach.

    Collects until `num_groups` groups have more than one distinct reward; surplus groups are dropped.

    Args:
        inner: what to collect from.
        num_groups: groups per step.
        max_rounds: collections per step before giving up.
    """

    def __init__(self, inner: FreshRollouts, num_groups: int, max_rounds: int):
        self._inner = inner
        self._num_groups = num_groups
        self._max_rounds = max_rounds

    def collect(self, step: int) -> Rollouts:
        """See `RolloutSource.collect`.

        Raises:
            DataExhausted: too few groups differ after `max_rounds` collections.
            NothingToLearnError: not one sample of all these collections could be graded.
        """
        kept: list[list[Trajectory]] = []
        rounds: list[Rollouts] = []
        num_groups_seen, some_reward = 0, False
        for round_index in range(self._max_rounds):
            rounds.append(self._inner.collect(step, round_index))
            groups = _by_group(rounds[-1].trajectories)
            num_groups_seen += len(groups)
            some_reward = some_reward or any(t.has_reward for group in groups for t in group)
            kept += [group for group in groups if _rewards_differ(group)]
            if len(kept) >= self._num_groups:
                return self._result(kept, rounds, num_groups_seen)
        if not some_reward:
            raise NothingToLearnError(
                f"Dynamic sampling got no reward for any answer to {num_groups_seen} prompts (step {step}). "
                "The trajectories and the environment's log say why; mend it and start the same command again."
            )
        raise DataExhausted(
            f"dynamic sampling found {len(kept)} of {self._num_groups} prompts with differing rewards in "
            f"{num_groups_seen} prompts (step {step}). The task is too easy or too hard for the model, or "
            f"raise grpo.dynamic_sampling_max_gen_batches={self._max_rounds} or grpo.batch_multiplier"
        )

    def _result(self, kept: list[list[Trajectory]], rounds: list[Rollouts], seen: int) -> Rollouts:
        chosen = kept[: self._num_groups]
        trajectories = []
        for group_index, group in enumerate(chosen):
            for trajectory in group:
                trajectory.group_index = group_index
                trajectories.append(trajectory)
        metrics = mean_metrics(rounds) | {
            "dynamic_sampling_num_gen_batches": float(len(rounds)),
            "dynamic_sampling_num_discarded_valid_samples": float(
                sum(len(group) for group in kept[self._num_groups :])
            ),
            "dynamic_sampling_kept_share": len(kept) / seen,
        }
        return Rollouts(trajectories, metrics)


def _by_group(trajectories: list[Trajectory]) -> list[list[Trajectory]]:
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.group_index].append(trajectory)
    return list(groups.values())


def _rewards_differ(group: list[Trajectory]) -> bool:
    return len({t.reward for t in group if t.has_reward}) > 1
