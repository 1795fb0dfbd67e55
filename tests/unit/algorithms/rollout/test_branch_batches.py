"""Steps whose samples have branches: counts of a step, parts of a step, groups of a checkpoint."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.rollout.ahead import OpenGroup
from nemo_rl.algorithms.rollout.batches import RolloutBatches, build_training_batch
from nemo_rl.algorithms.rollout.source import DynamicSampling, Group, SampledGroups
from nemo_rl.data.streams.prompt_stream import PromptPosition
from nemo_rl.experience.branches import Branch
from nemo_rl.experience.idle_shares import BusySeconds, IdleShares
from nemo_rl.experience.trajectory import Rollouts, Trajectory
from nemo_rl.experience.trajectory_log import TrajectoryLog
from nemo_rl.models.generation.interfaces import VersionSpan

pytestmark = pytest.mark.fast

LAYOUT = partial(build_training_batch, pad_token_id=0, mask_truncated=False)


def conversation(first: int, response: int) -> list[dict[str, Any]]:
    prompt, ids = torch.tensor([first]), torch.arange(first, first + response)
    written = {"role": "assistant", "content": "said", "token_ids": ids, "generation_logprobs": -torch.ones(response)}
    return [{"role": "user", "content": "asked", "token_ids": prompt}, written]


def sample(group: int, index: int, reward: float, num_branches: int, version: int = 5) -> Trajectory:
    number = 10 * group + 3 * index + 1
    spans = [VersionSpan(1, version)]
    branches = [Branch(conversation(number + n, 2), 1, spans) for n in range(1, num_branches + 1)]
    log = conversation(number, 3)
    return Trajectory(group, index, 7, "task", log, 1, reward=reward, weight_versions=[*spans], branches=branches)


class Prepared:
    """A source that gives three groups of two samples; the rewards of the last are equal."""

    metrics: dict[str, float]
    max_staleness = 1

    def __init__(self) -> None:
        self.metrics = {}

    def next_groups(self, step: int) -> Iterator[Group]:
        for number, (rewards, branches) in enumerate([((1, 0), (0, 2)), ((3, 1), (1, 1)), ((2, 2), (3, 0))]):
            pairs = zip(rewards, branches, strict=True)
            made = [sample(number, index, reward, count) for index, (reward, count) in enumerate(pairs)]
            yield Group((0, number), made, PromptPosition(0, number))


class Stream:
    """Notes the prompts and rewards of trained steps."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def metrics(self, rewards: Any) -> dict[str, float]:
        return {}

    def acknowledge(self, prompts: Any) -> None:
        self.done += prompts

    def finish_step(self, step: int, rewards: Any) -> None:
        self.rewards = rewards


def batches(source: Any, stream: Any, folder: Path, version: int = 5, samples_per_update: int = 2) -> RolloutBatches:
    nothing = SimpleNamespace(
        ensure_fresh=lambda: None, before_training=lambda: None, last_sync={}, weight_version=version
    )
    probe: Any = SimpleNamespace(check=lambda batch, num_stale_B: None)
    refitter: Any = nothing
    log, idle = TrajectoryLog(folder, enabled=True), IdleShares(lambda: BusySeconds([], 0.0))
    return RolloutBatches(
        rollouts=source,
        prompts=stream,
        refitter=refitter,
        probe=probe,
        layout=LAYOUT,
        trajectory_log=log,
        idle=idle,
        samples_per_update=samples_per_update,
    )


def test_a_step_counts_samples_and_trains_rows(tmp_path: Path) -> None:
    stream = Stream()
    source = batches(DynamicSampling(Prepared(), num_groups=2, max_rounds=1), stream, tmp_path, version=6)
    batch = source.next_batch(1, lambda name: nullcontext())
    assert len(batch.trajectories) == 4 and len(batch.rows) == batch.tensors.size == 8
    assert (batch.num_prompts, batch.rows_per_update) == (2, [4, 4])
    assert batch.num_stale_B is not None and batch.num_stale_B.shape == (8,)
    expected = {"num_samples": 4, "reward": 1.25, "num_rows": 8, "mean_branches_per_sample": 1, "avg_trajectory_age": 1}
    assert {name: batch.metrics[name] for name in expected} == expected
    assert batch.metrics["num_discarded_tokens"] == 3 + 3 * 2 + 3
    assert list(batch.rewards.values()) == [[1, 0], [3, 1], [2, 2]]
    batch.tensors["advantages"] = torch.zeros(8, 4)
    source.trained(1, batch)
    assert len(stream.done) == 3 and stream.rewards == batch.rewards
    assert len((tmp_path / "train_data_step1.jsonl").read_text().splitlines()) == 8


def test_without_branches_rows_are_counted_as_before(tmp_path: Path) -> None:
    class Plain(Prepared):
        def next_groups(self, step: int) -> Iterator[Group]:
            yield Group((0, 0), [sample(0, index, 1.0, 0) for index in range(2)])

    batch = batches(Plain(), Stream(), tmp_path).next_batch(1, lambda name: nullcontext())
    assert batch.rows_per_update is None
    assert all(row is one for row, one in zip(batch.rows, batch.trajectories, strict=True))


def test_groups_of_a_checkpoint_have_their_branches() -> None:
    made = [sample(0, 0, 1.0, 2), sample(0, 1, 0.0, 0)]
    group = OpenGroup(0, 3, PromptPosition(0, 0))
    group.progress.rollouts = Rollouts(made, {})
    finished = OpenGroup.from_state(group.state_dict(None), lambda rollouts: rollouts).finished(1.0)
    prompts: Any = SimpleNamespace(claim=list)
    sampled = SampledGroups.from_state(SampledGroups([Group((0, 0), made)], {}).state_dict(), prompts)
    expected = LAYOUT(made)
    for trajectories in (finished.trajectories, sampled.groups[0].trajectories):
        batch = LAYOUT(trajectories)
        assert all(torch.equal(batch[name], tensor) for name, tensor in expected.items())
        assert [len(each.branches) for each in trajectories] == [2, 0]
