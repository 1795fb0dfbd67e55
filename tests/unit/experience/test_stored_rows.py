"""Trajectories whose tokens are in the object store: a batch of them becomes the tensors of one without references."""

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray
import torch

from nemo_rl.algorithms.credit.advantages import make_advantage_estimator
from nemo_rl.algorithms.grpo import CreditAssignment
from nemo_rl.algorithms.rollout.batches import build_training_batch, num_stale_tokens
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.algorithms.scoring import PolicyScoring
from nemo_rl.config import ClippedPGLossConfig, GRPOConfig, PolicyConfig
from nemo_rl.data.packing import FixedSize
from nemo_rl.data.routed_experts import ROUTED_EXPERTS, note_experts
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.metrics import rollout_metrics
from nemo_rl.experience.runners.groups import GroupError, for_driver
from nemo_rl.experience.runners.stored import messages_of, split, whole
from nemo_rl.experience.trajectory import Outcome, Rollouts, Trajectory
from nemo_rl.models.batch_rows import SCORE_KEYS, STORED_ROWS, BatchRows
from nemo_rl.models.generation.interfaces import VersionSpan
from nemo_rl.models.policy.batching import count_valid, scoring_rows, shard_batch
from nemo_rl.models.policy.rank_calls import of_rows
from nemo_rl.models.policy.workers.scoring import ScoringWorker

PAD = 9
PAD_T = torch.tensor([PAD])


class Store:
    """An object store in this process: a reference is a number."""

    def __init__(self) -> None:
        self.objects: list[Any] = []

    def put(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    def get(self, reference: Any, timeout: float) -> Any:
        if isinstance(reference, list):
            return [self.objects[each] for each in reference]
        return self.objects[reference]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    made = Store()
    monkeypatch.setattr(ray, "get", made.get)
    monkeypatch.setattr(ray, "put", made.put)
    yield made


def sample(group: int, index: int, turns: list[int], reward: float | None) -> Trajectory:
    """A sample with a prompt of 10 tokens, which its group shares, and turns of random tokens with observations."""
    random = torch.Generator().manual_seed(100 * group + index)
    prompt = torch.arange(10) + group

    def drawn(count: int) -> torch.Tensor:
        return torch.randint(0, 50, (count,), generator=random)

    log: list[Any] = [{"role": "user", "content": "a question", "token_ids": prompt}]
    for length in turns:
        logprobs = -torch.rand(length, generator=random)
        log.append(
            {"role": "assistant", "content": "said", "token_ids": drawn(length), "generation_logprobs": logprobs}
        )
        log.append({"role": "environment", "content": "seen", "token_ids": drawn(2)})
    made = Trajectory(group, index, idx=group, task_name="task", message_log=log, prompt_length=10, reward=reward)
    made.turn_rewards = [0.5 for _ in turns]
    made.outcome = Outcome.REWARD_ERROR if reward is None else Outcome.FINISHED
    return made


def stored(groups: list[list[Trajectory]], store: Store, *, reads_collections: bool = False) -> list[Trajectory]:
    found = []
    for group in groups:
        summaries, packed = split([group], reads_collections=reads_collections)
        rows = store.put(packed)
        for summary in summaries:
            assert summary.stored is not None
            summary.stored = replace(summary.stored, rows=rows)  # type: ignore[arg-type]
        found += summaries
    return found


@pytest.fixture
def groups() -> list[list[Trajectory]]:
    return [
        [sample(0, 0, [3, 4], 1.0), sample(0, 1, [5], 0.0), sample(0, 2, [1], None)],
        [sample(1, 0, [2], 0.25), sample(1, 1, [7, 1], 0.5), sample(1, 2, [6], 0.25)],
    ]


def credited(trajectories: list[Trajectory]) -> tuple[BatchedDataDict[Any], dict[str, float]]:
    batch = build_training_batch(trajectories, PAD, mask_truncated=False)
    config = GRPOConfig.build()
    estimator = make_advantage_estimator(config, ClippedPGLossConfig.build())
    return batch, CreditAssignment(estimator, config).assign(batch, trajectories)


def test_a_rank_gets_the_tensors_of_the_driver_bit_for_bit(groups: list[list[Trajectory]], store: Store) -> None:
    dense, dense_metrics = credited([each for group in groups for each in group])
    light, light_metrics = credited(stored(groups, store))
    assert STORED_ROWS in light and "input_ids" not in light
    whole = BatchRows.of(light).whole()
    assert set(whole) == set(dense)
    for name, tensor in dense.items():
        assert whole[name].dtype == tensor.dtype
        assert torch.equal(whole[name], tensor), name
    assert light_metrics == pytest.approx(dense_metrics, rel=1e-6)
    assert count_valid(light) == count_valid(dense)
    counted = [BatchRows.of(batch).counted().tolist() for batch in (light, dense)]
    assert counted[0] == counted[1] and sum(counted[0]) == 5
    assert BatchRows.of(light).prefixes() == BatchRows.of(dense).prefixes()


def test_experts_of_tokens_are_stored_with_them(groups: list[list[Trajectory]], store: Store) -> None:
    """Of the groups whose engine has reported them; the others fall back."""
    for number, each in enumerate(groups[0]):
        note_experts(each.message_log, np.arange(12 * each.length).reshape(-1, 3, 4).astype(np.int16) + number)
    dense = build_training_batch([each for group in groups for each in group], PAD, mask_truncated=False)
    summaries = stored(groups, store)
    light = BatchRows.of(build_training_batch(summaries, PAD, mask_truncated=False)).whole()
    experts = dense[ROUTED_EXPERTS]
    assert experts.dtype == torch.int16 and experts.shape == (*dense["input_ids"].shape, 3, 4)
    assert torch.equal(light[ROUTED_EXPERTS], experts)
    assert experts[1, :2, 0, 0].tolist() == [1, 13]
    assert bool((experts[3:] == -1).all()) and bool((experts[1, groups[0][1].length :] == -1).all())
    back = whole(summaries)
    assert torch.equal(back[1].message_log[1][ROUTED_EXPERTS], groups[0][1].message_log[1][ROUTED_EXPERTS])
    assert ROUTED_EXPERTS not in back[4].message_log[1]
    again = Trajectory.from_state(groups[0][1].state_dict())
    assert torch.equal(again.message_log[1][ROUTED_EXPERTS], groups[0][1].message_log[1][ROUTED_EXPERTS])


def test_what_rows_share_does_not_depend_on_the_objects_that_hold_them(
    groups: list[list[Trajectory]], store: Store
) -> None:
    """All prompts begin with the same tokens here, and groups that finish together are stored together."""
    system = torch.arange(60, 80)
    for group in groups:
        for each in group:
            each.message_log[0]["token_ids"] = torch.cat([system, each.message_log[0]["token_ids"]])
            each.prompt_length += 20
    dense, _ = credited([each for group in groups for each in group])
    apart, _ = credited(stored(groups, store))
    together, packed = split(groups, reads_collections=False)
    rows = store.put(packed)
    for summary in together:
        assert summary.stored is not None
        summary.stored = replace(summary.stored, rows=rows)  # type: ignore[arg-type]
    of_one_object, _ = credited(together)
    expected = BatchRows.of(dense).prefixes()
    assert [shared > 0 for shared in expected.shared] == [False, True, True, False, True, True]
    assert BatchRows.of(apart).prefixes() == BatchRows.of(of_one_object).prefixes() == expected


class Rank(ScoringWorker):
    """A rank whose model gives token t of a row -1 / (2 + its id + t), and twice that with the first weights."""

    def __init__(self, scores: Callable[[BatchedDataDict[Any], float], torch.Tensor]) -> None:
        self._gives_scores = True
        self._scores = scores

    def get_logprobs(self, data: BatchedDataDict[Any], sizes: Sequence[int]) -> torch.Tensor:
        return self._scores(data, 1.0)

    def get_reference_policy_logprobs(self, data: BatchedDataDict[Any], sizes: Sequence[int]) -> torch.Tensor:
        return self._scores(data, 2.0)


class Scorer:
    """Scores rows in this process on two ranks; see `Rank`."""

    def _scores(self, rows: BatchedDataDict[Any], divisor: float) -> torch.Tensor:
        positions_T = torch.arange(rows["input_ids"].shape[1])
        return -divisor / (2.0 + rows["input_ids"] + positions_T)

    def get_logprobs(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        return BatchedDataDict({"logprobs": self._scores(data, 1.0)})

    def get_reference_policy_logprobs(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        return BatchedDataDict({"reference_logprobs": self._scores(data, 2.0)})

    def keep_logprobs(self, data: BatchedDataDict[Any], *, of_reference: bool = False) -> Any:
        rows = scoring_rows("keep_logprobs", data, PolicyConfig.build(model_name="tiny"))
        sharded = shard_batch(rows, 2, FixedSize(2))
        rank = Rank(self._scores)
        kept = [
            rank.keep_logprobs(part, sizes, of_reference)
            for part, sizes in zip(sharded.data, sharded.sizes, strict=True)
        ]
        return of_rows(sharded, kept)


def marked(groups: list[list[Trajectory]], spans: list[list[VersionSpan]]) -> list[list[Trajectory]]:
    for trajectory, versions in zip([each for group in groups for each in group], spans, strict=True):
        trajectory.weight_versions = versions
    return groups


OLD, NEW = VersionSpan(10, 3), VersionSpan(10, 4)
VERSIONS = {
    "current weights": [[NEW]] * 6,
    "older weights": [[OLD]] * 6,
    "both": [[OLD, VersionSpan(15, 4)], [NEW], [OLD], [OLD, VersionSpan(11, 4)], [NEW], [OLD]],
}


@pytest.mark.parametrize("threshold", [None, 1.9])
@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("needs_prev", [False, True])
@pytest.mark.parametrize("versions", VERSIONS)
def test_scores_of_stored_rows_are_those_of_rows_in_the_driver(
    groups: list[list[Trajectory]],
    store: Store,
    versions: str,
    needs_prev: bool,
    corrects: bool,
    threshold: float | None,
) -> None:
    samples = [each for group in marked(groups, VERSIONS[versions]) for each in group]
    stage = PolicyScoring(Scorer(), needs_prev, True, threshold, corrects)  # type: ignore[arg-type]
    found = []
    for trajectories in (samples, stored(groups, store)):
        batch = build_training_batch(trajectories, PAD, mask_truncated=False)
        num_stale_B = num_stale_tokens(trajectories, version=4)
        metrics = stage.apply(StepBatch(batch, trajectories, num_stale_B=num_stale_B))
        found.append((BatchRows.of(batch).whole(), metrics, batch))
    (dense, dense_metrics, _), (light, light_metrics, light_batch) = found
    assert light_metrics == dense_metrics
    assert set(light) == set(dense)
    assert not any(name in light_batch and torch.is_tensor(light_batch[name]) for name in SCORE_KEYS)
    for name, tensor in dense.items():
        lengths = torch.arange(tensor.shape[1])[None] < dense["input_lengths"][:, None] if tensor.ndim == 2 else 1
        assert torch.equal(light[name] * lengths, tensor * lengths), name


def test_tokens_go_back_into_trajectories(groups: list[list[Trajectory]], store: Store) -> None:
    light = stored(groups, store)
    expected = [each for group in groups for each in group]
    for found, sample_ in zip(whole(light), expected, strict=True):
        assert found.stored is None
        assert [message["role"] for message in found.message_log] == [m["role"] for m in sample_.message_log]
        for message, other in zip(found.message_log, sample_.message_log, strict=True):
            assert message.keys() == other.keys()
            assert torch.equal(message["token_ids"], other["token_ids"])
            assert message["token_ids"].dtype == torch.int64
            assert torch.equal(message.get("generation_logprobs", PAD_T), other.get("generation_logprobs", PAD_T))
    mixed = build_training_batch([*expected[:2], *light[2:]], PAD, mask_truncated=False)
    dense = build_training_batch(expected, PAD, mask_truncated=False)
    assert all(torch.equal(mixed[name], tensor) for name, tensor in dense.items())


def test_ranks_get_their_rows_and_fillers_that_do_not_count(groups: list[list[Trajectory]], store: Store) -> None:
    dense, _ = credited([each for group in groups for each in group])
    light, _ = credited(stored(groups, store))
    expected, found = (shard_batch(batch, 2, FixedSize(4)).data for batch in (dense, light))
    for rank_dense, rank_light in zip(expected, found, strict=True):
        whole = BatchRows.of(rank_light).whole()
        for name in ("input_lengths", "sample_mask", "token_mask", "advantages", "generation_logprobs"):
            counted = rank_dense["sample_mask"][:, None] if rank_dense[name].ndim == 2 else 1
            assert torch.equal(whole[name] * counted, rank_dense[name] * counted), name


def test_rows_leave_a_process_as_columns_and_arrive_as_rows(groups: list[list[Trajectory]], store: Store) -> None:
    light, _ = credited(stored(groups, store))
    light["of_other_rows"] = [*range(light.size)]
    sent = pickle.dumps(light)
    arrived = pickle.loads(sent)
    assert arrived[STORED_ROWS] == light[STORED_ROWS] and arrived["of_other_rows"] == light["of_other_rows"]
    assert b"StoredRow" not in sent  # a row of its own would name its class
    assert pickle.loads(pickle.dumps(light.slice(0, 0)))[STORED_ROWS] == []


def test_the_driver_has_lengths_rewards_and_metrics_but_no_texts(groups: list[list[Trajectory]], store: Store) -> None:
    samples = [each for group in groups for each in group]
    light = stored(groups, store)
    assert rollout_metrics(light) == rollout_metrics(samples)
    assert [each.turn_spans for each in light] == [each.turn_spans for each in samples]
    assert light[0].prompt_text == "a question" and light[0].response_text == ""
    assert [messages_of(each) for each in light] == [each.turns for each in samples]


def test_a_group_that_cannot_be_sent_is_an_error_of_its_own(groups: list[list[Trajectory]]) -> None:
    first, second = groups
    second[0].extra_env_info = {"lock": threading.Lock()}
    taken: list[Any] = [(number, "train", Rollouts(group, {})) for number, group in enumerate(groups)]
    sent, packed = for_driver(taken, reads_collections=True)
    outcomes = dict(sent)
    assert isinstance(outcomes[0], Rollouts) and isinstance(outcomes[1], GroupError)
    assert "cannot pickle" in str(outcomes[1].exception())
    assert packed is not None and len(packed.ends) == len(first)
    sent, packed = for_driver(taken, reads_collections=False)
    assert packed is not None and len(packed.ends) == len(first) + len(second)
    assert all(isinstance(outcome, Rollouts) for _, outcome in sent)


def test_environments_that_read_collections_get_texts_and_metadata_from_runners_and_checkpoints(
    groups: list[list[Trajectory]], store: Store
) -> None:
    (first, second, *_), _ = groups
    first.extra_env_info, second.extra_env_info = {"score": 3}, {"board": object()}
    assert [each.extra_env_info for each in stored(groups, store)[:2]] == [None, None]
    found = stored(groups, store, reads_collections=True)
    assert found[0].turns == first.turns
    assert [each.extra_env_info for each in found[:2]] == [first.extra_env_info, second.extra_env_info]
    restored = [Trajectory.from_state(each.state_dict()) for each in (first, second)]
    assert [each.extra_env_info for each in restored] == [{"score": 3}, None]
