"""Samples of several conversations: their rows, states, stored rows, logs, metrics and reviews."""

import asyncio
import json
import logging
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from rollout_parts import LetterTokenizer

from nemo_rl.algorithms.rollout.batches import age, age_metrics, build_training_batch, num_stale_tokens
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.commands.regrade.replay import replay
from nemo_rl.commands.regrade.stored_samples import read_samples
from nemo_rl.config import RewardPenaltyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience import trajectory_log
from nemo_rl.experience.branches import Branch
from nemo_rl.experience.metrics import rollout_metrics
from nemo_rl.experience.penalties import ReviewSettings
from nemo_rl.experience.progress import SampleProgress, num_stored_tokens
from nemo_rl.experience.rows import rows_of, rows_per_update
from nemo_rl.experience.runners.groups import _sent
from nemo_rl.experience.runners.stored import located, messages_of, split, whole
from nemo_rl.experience.trajectory import Rollouts, Trajectory
from nemo_rl.experience.trajectory_log import ShownAnswers, TrajectoryLog
from nemo_rl.files.safe_load import is_plain
from nemo_rl.models.batch_rows import BatchRows, StoredRows, stale_tokens
from nemo_rl.models.generation.interfaces import ResponseSoFar, VersionSpan
from nemo_rl.models.policy.batching import global_batches
from nemo_rl.utils.errors import DataError

pytestmark = pytest.mark.fast


def said(text: str, *, writes: bool = False) -> dict[str, Any]:
    """A message with one token for each letter; a written letter has minus a hundredth of its number."""
    ids = torch.tensor([ord(letter) for letter in text])
    message = {"role": "assistant" if writes else "user", "content": text, "token_ids": ids}
    return message | {"generation_logprobs": -ids.float() / 100} if writes else message


def conversation(text: str) -> list[dict[str, Any]]:
    """The messages of a text in which `|` separates messages; those after `>` are written by the policy.

    Example:
        >>> conversation("ab|>cd|e")  # the policy wrote c and d
    """
    return [said(part.removeprefix(">"), writes=part.startswith(">")) for part in text.split("|")]


def branch(text: str, version: int = 4, *, trains: bool = True) -> Branch:
    log = conversation(text)
    length = len(text.split("|>")[0].replace("|", ""))
    return Branch(log, length, [VersionSpan(length, version)], trains)


def sample(main: str, *branches: Branch, index: int = 0, version: int = 4, **values: Any) -> Trajectory:
    first = branch(main, version)
    given: dict[str, Any] = {"reward": 1.0, "turn_rewards": [1.0]} | values
    return Trajectory(
        0,
        index,
        index,
        "task",
        first.message_log,
        first.prompt_length,
        weight_versions=first.weight_versions,
        branches=list(branches),
        **given,
    )


@pytest.fixture
def samples() -> list[Trajectory]:
    """The second has two branches, of which the last repeats an answer and does not train."""
    return [
        sample("ab|>cd", index=0),
        sample("ab|>c|d|>ef", branch("abcd|>e", 3), branch("abx|c|>ghijk", trains=False), index=1, reward=0.0),
        sample("ab|>ghi", index=2),
    ]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An object store in this process."""
    objects: dict[str, Any] = {}
    monkeypatch.setattr(ray, "get", lambda names, timeout: [objects[name] for name in names])
    return objects


def in_store(samples: list[Trajectory], store: dict[str, Any]) -> list[Trajectory]:
    summaries, store["group"] = split([samples], reads_collections=False)
    rows: Any = "group"
    return located(Rollouts(summaries), rows).trajectories


def test_a_sample_without_branches_is_its_own_row() -> None:
    alone = [sample("ab|>cd", index=0), sample("ab|>c", index=1)]
    rows = rows_of(alone)
    assert all(row is one for row, one in zip(rows, alone, strict=True))
    assert rows_per_update(alone, 1) is None
    assert "num_rows" not in rollout_metrics(alone)


def test_each_conversation_is_a_row(samples: list[Trajectory]) -> None:
    samples[1].malformed_thinking = [(3, 4), (7, 8), (11, 13)]
    rows = rows_of(samples)
    assert [(row.sample_index, row.branch) for row in rows] == [(0, None), (1, 0), (1, 1), (1, 2), (2, None)]
    assert [row.loss_multiplier for row in rows] == [1, 1, 1, 0, 1]
    assert [row.prompt_length for row in rows] == [2, 2, 4, 4, 2]
    assert [row.length for row in rows] == [4, 6, 5, 9, 5]
    assert [row.response_length for row in rows] == [2, 3, 1, 5, 3]
    assert [row.turn_spans for row in rows[1:4]] == [[(2, 3), (4, 6)], [(4, 5)], [(4, 9)]]
    assert [row.malformed_thinking for row in rows[1:4]] == [[(3, 4)], [(1, 2)], [(0, 2)]]
    assert [row.weight_versions for row in rows[1:4]] == [[(2, 4)], [(4, 3)], [(4, 4)]]
    assert not any(row.branches for row in rows) and [row.reward for row in rows[1:4]] == [0.0] * 3
    assert all(row is again for row, again in zip(rows, rows_of(rows), strict=True))


def test_a_sample_has_the_lengths_and_turns_of_all_of_its_conversations(samples: list[Trajectory]) -> None:
    whole_sample = samples[1]
    assert (whole_sample.length, whole_sample.response_length, whole_sample.num_prompt_tokens) == (20, 9, 10)
    assert whole_sample.turn_spans == [(2, 3), (4, 6), (10, 11), (15, 20)]
    metrics = rollout_metrics(samples)
    expected = {
        "num_samples": 3,
        "reward": 2 / 3,
        "num_rows": 5,
        "mean_branches_per_sample": 2 / 3,
        "max_branches_per_sample": 2,
        "mean_gen_tokens_per_sample": (2 + 9 + 3) / 3,
        "mean_env_tokens_per_sample": 1 / 3,
        "total_num_tokens": 4 + 20 + 5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_a_conversation_without_a_written_token_is_no_sequence_of_the_loss() -> None:
    batch = build_training_batch([sample("ab|>c", branch("ab|c"))], 0, mask_truncated=False)
    assert batch["sample_mask"].tolist() == [1, 0]


def test_the_batch_has_the_rows_in_order(samples: list[Trajectory]) -> None:
    batch = build_training_batch(samples, 0, mask_truncated=False)
    texts = ["".join(map(chr, ids[:n])) for ids, n in zip(batch["input_ids"], batch["input_lengths"], strict=True)]
    assert texts == ["abcd", "abcdef", "abcde", "abxcghijk", "abghi"]
    written = [
        "".join(map(chr, ids[mask > 0])) for ids, mask in zip(batch["input_ids"], batch["token_mask"], strict=True)
    ]
    assert written == ["cd", "cef", "e", "ghijk", "ghi"]
    assert batch["sample_mask"].tolist() == [1, 1, 1, 0, 1]
    assert len(StepBatch(batch, samples).rows) == batch.size
    samples[1].reward = None
    assert build_training_batch(samples, 0, mask_truncated=False)["sample_mask"].tolist() == [1, 0, 0, 0, 1]


def test_a_sample_is_as_old_as_its_oldest_conversation(samples: list[Trajectory]) -> None:
    assert [age(each, 4) for each in samples] == [0, 1, 0]
    assert age_metrics(samples, 4) == {"avg_trajectory_age": 1 / 3, "max_trajectory_age": 1.0}
    batch = build_training_batch(samples, 0, mask_truncated=False)
    num_stale_B = num_stale_tokens(samples, 4)
    assert num_stale_B is not None and num_stale_B.tolist() == [0, 0, 5, 0, 0]
    assert (stale_tokens(batch, num_stale_B) & (batch["token_mask"] > 0)).sum(1).tolist() == [0, 0, 1, 0, 0]


def test_an_update_has_the_rows_of_its_samples(samples: list[Trajectory]) -> None:
    assert rows_per_update([*samples, samples[1]], 2) == [4, 4]
    assert rows_per_update(samples, 3) == [5]
    with pytest.raises(DataError, match="3 samples do not divide into optimizer updates of 2 samples"):
        rows_per_update(samples, 2)
    batch: BatchedDataDict[Any] = BatchedDataDict(row=torch.arange(5))
    assert [part["row"].tolist() for part in global_batches(batch, [1, 3, 1], allow_partial=False)] == [
        [0],
        [1, 2, 3],
        [4],
    ]
    for wrong in ([2, 2], [5, 0]):
        with pytest.raises(DataError, match="at least one row for each update, 5 rows in total"):
            global_batches(batch, wrong, allow_partial=False)


def assert_equal(found: Trajectory, expected: Trajectory) -> None:
    plain = [replace(each, message_log=[], branches=[]) for each in (found, expected)]
    assert plain[0] == plain[1]
    for one, other in zip(found.conversations, expected.conversations, strict=True):
        assert (one.prompt_length, one.weight_versions) == (other.prompt_length, other.weight_versions)
        for message, right in zip(one.message_log, other.message_log, strict=True):
            assert message.keys() == right.keys() and message["content"] == right["content"]
            tensors = ("token_ids", "generation_logprobs")
            assert all(torch.equal(message[name], right[name]) for name in tensors if name in right)
    assert [each.trains for each in found.branches] == [each.trains for each in expected.branches]


def test_states_of_samples_have_their_branches(samples: list[Trajectory]) -> None:
    for each in samples:
        state = each.state_dict()
        assert is_plain(state)
        assert_equal(Trajectory.from_state(state), each)
    old = samples[0].state_dict()
    del old["branches"]
    assert_equal(Trajectory.from_state(old), samples[0])
    unfinished = SampleProgress(samples[1]).state_dict(ResponseSoFar.nothing())
    assert num_stored_tokens(unfinished) == samples[1].response_length


def test_stored_rows_are_the_rows(samples: list[Trajectory], store: dict[str, Any]) -> None:
    dense = build_training_batch(samples, 0, mask_truncated=False)
    light_samples = in_store(samples, store)
    light = build_training_batch(light_samples, 0, mask_truncated=False)
    assert isinstance(BatchRows.of(light), StoredRows)
    tensors = BatchRows.of(light).whole()
    assert set(tensors) == set(dense)
    assert all(torch.equal(tensors[name], dense[name]) for name in dense)
    num_stale_B = num_stale_tokens(light_samples, 4)
    assert num_stale_B is not None and num_stale_B.tolist() == [0, 0, 5, 0, 0]
    assert rollout_metrics(light_samples) == rollout_metrics(samples)
    assert [messages_of(row) for row in rows_of(light_samples)] == [row.turns for row in rows_of(samples)]
    for found, expected in zip(whole(light_samples), samples, strict=True):
        assert_equal(found, expected)
    for found, expected in zip(whole(rows_of(light_samples)), rows_of(samples), strict=True):
        assert_equal(found, expected)


def test_whole_samples_are_sent_with_their_branches(samples: list[Trajectory]) -> None:
    for each in samples:
        expected = Trajectory.from_state(each.state_dict())
        assert_equal(pickle.loads(pickle.dumps(_sent(each))), expected)


def test_a_terminal_shows_the_best_and_the_worst_answer(
    tmp_path: Path, samples: list[Trajectory], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="nemo_rl")
    for reward, each in enumerate(samples):
        each.reward = float(reward)
    samples[0].reward = None
    shown = ShownAnswers(number=2, period=10)
    shown.show(1, samples)
    assert caplog.records == []
    monkeypatch.setattr(trajectory_log, "is_terminal", lambda stream: True)
    for step in (1, 2, 10):
        shown.show(step, samples)
    lines = [record.message for record in caplog.records]
    assert [line.split(":")[0].strip() for line in lines] == ["reward 2", "reward 1"], "of the first step only"
    assert all("  ->  " in line and "\n" not in line for line in lines)


def test_the_log_has_a_line_for_each_conversation(tmp_path: Path, samples: list[Trajectory]) -> None:
    log = TrajectoryLog(tmp_path, enabled=True)
    log.write_training(1, samples, build_training_batch(samples, 0, mask_truncated=False))
    log.write_validation(1, samples)
    for name in ("train", "val"):
        lines = [json.loads(line) for line in (tmp_path / f"{name}_data_step1.jsonl").read_text().splitlines()]
        assert [(line["sample"], line.get("branch")) for line in lines] == [
            (0, None),
            (1, 0),
            (1, 1),
            (1, 2),
            (2, None),
        ]
        assert [line["response_length"] for line in lines] == [2, 3, 1, 5, 3]
        assert [line["content"][-1]["content"] for line in lines] == ["cd", "ef", "e", "ghijk", "ghi"]
        assert "branch" not in lines[0]
    assert [each.row["sample"] for each in read_samples(tmp_path / "train_data_step1.jsonl")] == [0, 1, 2]


def test_penalties_see_the_turns_of_all_conversations() -> None:
    penalties = RewardPenaltyConfig.build(
        penalize_malformed_think_tag=True, penalize_empty_final_answer=True, thinking_tags=["(", ")"]
    )
    # The thinking that the first conversation ends with is not open in the second one.
    made = sample("a|>(b)c|d|>e(", branch(" |>(g)h)k|i|>(j) "))
    ReviewSettings(penalties).make(LetterTokenizer())([made])
    assert made.penalties == {"empty_final_answer": [1, 3], "malformed_think_tag": [1, 2]}
    tokens = [chr(token) for log in made.logs for message in log for token in message["token_ids"].tolist()]
    assert [(start, tokens[start]) for start, _ in made.malformed_thinking] == [(7, "("), (13, ")")]
    assert [row.malformed_thinking for row in rows_of([made])] == [[(7, 8)], [(5, 6)]]
    assert made.num_thinking_tokens == 3


def test_a_sample_of_several_conversations_is_not_played_again(tmp_path: Path, samples: list[Trajectory]) -> None:
    TrajectoryLog(tmp_path, enabled=True).write_validation(1, samples)
    stored = list(read_samples(tmp_path / "val_data_step1.jsonl"))[1]
    none: Any = None
    graded = asyncio.run(replay(stored, none, "task", none))
    assert graded.reward is None and graded.error is not None and "several conversations" in graded.error
