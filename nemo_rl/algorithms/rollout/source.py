"""Where a training step's trajectories come from.

A source pulls prompts and gives groups of graded trajectories, each when it is finished. Variants wrap each other
instead of adding branches to a loop: `DynamicSampling` wraps `FreshRollouts`. Invariant: the groups of a step do not
depend on the order in which they finish; and the position that a source saves is behind what was trained on, never
ahead of it.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_rl.config import RolloutSourceConfig
from nemo_rl.data.prompt_stream import DataExhausted, PromptStream
from nemo_rl.experience.metrics import mean_metrics
from nemo_rl.experience.rollouts import RolloutKey, RolloutRunner
from nemo_rl.experience.trajectory import Rollouts, Trajectory
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.utils.errors import NothingToLearnError
from nemo_rl.utils.named_parts import Registry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """The finished samples of one prompt.

    Attributes:
        order: place among the groups of a step, whenever it finished: round of sampling, prompt of the round.
        trajectories: ordered by sample.
    """

    order: tuple[int, int]
    trajectories: Sequence[Trajectory]


class RolloutSource(Protocol):
    """Gives a step its experience. One that samples ahead of training keeps what it has sampled in its state."""

    @property
    def epoch(self) -> int:
        """Finished passes over the prompts."""

    @property
    def metrics(self) -> dict[str, float]:
        """How the groups of the last step were got, logged under `train/`."""

    def next_groups(self, step: int) -> Iterator[Group]:
        """The groups of training step `step` (from 1), each as soon as it is finished.

        Raises:
            DataExhausted: the prompts do not suffice for the step.
        """

    def trained(self) -> None:
        """All groups given so far were trained on; only now the position that `state_dict` gives moves behind them."""

    def state_dict(self) -> dict[str, Any]:
        """All that a fresh source needs to give every prompt that was not trained on, and none twice.

        Plain values and tensors: the keys of `PromptStream.state_dict`, which a run that goes on looks at before it
        starts anything, and beside them what was sampled ahead, finished or not.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a stored state; only before the first step."""


SOURCES: Registry[RolloutSource] = Registry(
    "rollout source",
    RolloutSource,
    {"fresh": f"{__name__}.FreshRollouts", "dynamic_sampling": f"{__name__}.DynamicSampling"},
    attributes=("epoch", "metrics"),
)
"""Sources that `rollout_source.name` may name; a user's own is constructed with the source that it wraps."""


def source_wrapper(config: RolloutSourceConfig, key: str) -> Callable[[RolloutSource], RolloutSource]:
    """Check the user's own source, and return a function that wraps a source in it; without one it changes nothing.

    Args:
        config: the section.
        key: dotted path of the section.

    Raises:
        ConfigError: the class cannot be used, or its arguments do not fit.
    """
    is_own = SOURCES.is_own(config.name)
    if is_own:
        SOURCES.check_arguments(config.name, key, config.kwargs, num_given=1)

    def wrap(inner: RolloutSource) -> RolloutSource:
        return SOURCES.make(config.name, key, config.kwargs, inner) if is_own else inner

    return wrap


@dataclass
class FreshRollouts:
    """Samples the next batch of prompts with the current weights.

    Nothing is sampled ahead: a step that was not trained on is sampled again, from the weights of its checkpoint.

    Attributes:
        prompts: the data.
        runner: plays rollouts.
        sampling: how to sample.
        num_generations: samples per prompt.
        run_seed: seed of the run.
        metrics: how the groups of the last step were got.
    """

    prompts: PromptStream
    runner: RolloutRunner
    sampling: SamplingParams
    num_generations: int
    run_seed: int
    metrics: dict[str, float] = field(default_factory=dict, init=False)

    @property
    def epoch(self) -> int:
        """Finished passes over the prompts."""
        return self.prompts.epoch

    def next_groups(self, step: int, round_index: int = 0) -> Iterator[Group]:
        """See `RolloutSource.next_groups`; `round_index` tells repeated collections of a step apart."""
        key = RolloutKey(self.run_seed, "train", step, round_index)
        collection = self.runner.stream(self.prompts.next_batch(), self.num_generations, self.sampling, key)
        for samples in collection:
            yield Group((round_index, samples[0].group_index), samples)
        self.metrics = collection.metrics

    def trained(self) -> None:
        """All prompts drawn so far are done with."""
        self.prompts.trained()

    def state_dict(self) -> dict[str, Any]:
        """The position in the prompts."""
        return self.prompts.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a stored position."""
        self.prompts.load_state_dict(state)


class DynamicSampling:
    """DAPO's dynamic sampling (Yu et al. 2025, section 3.2): only groups whose rewards differ teach.

    Collects until `num_groups` groups have more than one distinct reward, after the scaling of rewards, which may cut
    different ones to the same; surplus groups are dropped.

    Args:
        inner: what to collect from.
        num_groups: groups per step.
        max_rounds: collections per step before giving up.
        scale: how rewards `[G]` are scaled before they become advantages; None leaves them.
    """

    def __init__(
        self, inner: FreshRollouts, num_groups: int, max_rounds: int, scale: Callable[[Tensor], Tensor] | None = None
    ):
        self._inner = inner
        self._num_groups = num_groups
        self._max_rounds = max_rounds
        self._scale = scale
        self.metrics: dict[str, float] = {}

    @property
    def epoch(self) -> int:
        """Finished passes over the prompts."""
        return self._inner.epoch

    def next_groups(self, step: int) -> Iterator[Group]:
        """See `RolloutSource.next_groups`.

        Raises:
            DataExhausted: too few groups differ after `max_rounds` collections.
            NothingToLearnError: not one sample of all these collections could be graded.
        """
        num_kept, num_seen, some_reward = 0, 0, False
        rounds: list[Rollouts] = []
        for round_index in range(self._max_rounds):
            groups = sorted(self._inner.next_groups(step, round_index), key=lambda group: group.order)
            num_seen += len(groups)
            rounds.append(Rollouts([t for group in groups for t in group.trajectories], self._inner.metrics))
            some_reward = some_reward or any(t.has_reward for t in rounds[-1].trajectories)
            differing = [group for group in groups if self._rewards_differ(group)]
            yield from differing[: self._num_groups - num_kept]
            num_kept += len(differing)
            if num_kept >= self._num_groups:
                self._note(rounds, num_kept, num_seen, differing[len(differing) - num_kept + self._num_groups :])
                return
        if not some_reward:
            raise NothingToLearnError(
                f"Dynamic sampling got no reward for any answer to {num_seen} prompts (step {step}). "
                "The trajectories and the environment's log say why; mend it and start the same command again."
            )
        raise DataExhausted(
            f"dynamic sampling found {num_kept} of {self._num_groups} prompts with differing rewards in "
            f"{num_seen} prompts (step {step}). The task is too easy or too hard for the model, or "
            f"raise grpo.dynamic_sampling_max_gen_batches={self._max_rounds} or grpo.batch_multiplier"
        )

    def trained(self) -> None:
        """All prompts drawn so far are done with, those of dropped groups too."""
        self._inner.trained()

    def state_dict(self) -> dict[str, Any]:
        """The position in the prompts."""
        return self._inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a stored position."""
        self._inner.load_state_dict(state)

    def _note(self, rounds: Sequence[Rollouts], num_kept: int, num_seen: int, surplus: Sequence[Group]) -> None:
        self.metrics = mean_metrics(rounds) | {
            "dynamic_sampling_num_gen_batches": float(len(rounds)),
            "dynamic_sampling_num_discarded_valid_samples": float(sum(len(g.trajectories) for g in surplus)),
            "dynamic_sampling_kept_share": num_kept / num_seen,
        }

    def _rewards_differ(self, group: Group) -> bool:
        rewards_G = torch.tensor([t.reward for t in group.trajectories if t.has_reward], dtype=torch.float64)
        return len((self._scale(rewards_G) if self._scale else rewards_G).unique()) > 1
