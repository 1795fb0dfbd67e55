"""Penalties on trajectories: the same in the driver, a runner actor, a resumed run and `nemo_rl regrade`."""

import json
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rollout_parts import LetterTokenizer, ScriptedEngine, ScriptedEnvironment, graded, prompts

from nemo_rl.algorithms.rollout.batches import build_training_batch
from nemo_rl.commands.regrade.replay import Regraded, review_again, turn_spans
from nemo_rl.commands.regrade.run import write_file, write_tables
from nemo_rl.commands.regrade.stored_samples import read_samples
from nemo_rl.config import EffortLevelConfig, RewardPenaltyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.metrics import rollout_metrics, validation_metrics
from nemo_rl.experience.penalties import AnswerReview, ReviewSettings, nothing
from nemo_rl.experience.progress import GroupProgress, SampleProgress
from nemo_rl.experience.rollouts import RolloutKey, RolloutLimits, RolloutRunner
from nemo_rl.experience.runners.stored import split
from nemo_rl.experience.thinking import SampledTurn
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.experience.trajectory_log import TrajectoryLog
from nemo_rl.models.generation.interfaces import GenerationRequest, ResponseSoFar, SamplingParams
from nemo_rl.utils.errors import ConfigError

pytestmark = pytest.mark.fast

SAMPLING = SamplingParams(max_new_tokens=100)
WELL, OPEN, EMPTY, UNWANTED = "(t)a", "(t", "(t) ", "(t)#"
PENALTIES = RewardPenaltyConfig.build(
    penalize_malformed_think_tag=True,
    penalize_empty_final_answer=True,
    penalize_unwanted_tokens=True,
    token_ids={"unwanted": [ord("#")]},
    thinking_tags=["(", ")"],
)


class Shouting:
    """Penalises final answers with too many capital letters."""

    def __init__(self, most: int) -> None:
        self.most = most

    def offending(self, turns: list[SampledTurn]) -> list[int]:
        return [n for n, turn in enumerate(turns) if sum(map(str.isupper, turn.final_answer)) > self.most]


class NoSuchTurn:
    """Names a turn that does not exist."""

    def offending(self, turns: list[SampledTurn]) -> list[int]:
        return [len(turns)]


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    thread = EventLoopThread()
    yield thread
    thread.close()


def played(
    loop: EventLoopThread, *answers: str, review: Any = None, reward: float | None = 1.0, phase: str = "train"
) -> list[Trajectory]:
    """Play a prompt for each of `answers`, which is its response; `|` separates turns."""
    runner, batch = runner_of(loop, *answers, review=review, reward=reward)
    return runner.collect(batch, 1, SAMPLING, RolloutKey(1, phase, 1)).trajectories


def runner_of(
    loop: EventLoopThread, *answers: str, review: Any = None, reward: float | None = 1.0
) -> tuple[RolloutRunner, BatchedDataDict[Any]]:
    """Build a runner and its prompts; see `played`."""

    def script(request: GenerationRequest) -> list[int]:
        said = bytes(np.array(request.prompt_token_ids, np.uint8)).decode().split("!")
        return [ord(letter) for letter in answers[said[0].count("?")].split("|")[len(said) - 1]]

    def judge(log: list[dict[str, Any]], metadata: Any) -> Any:
        turn, number = sum(m["role"] == "assistant" for m in log), log[0]["content"].count("?")
        is_over = turn == len(answers[number].split("|"))
        observation = {"role": "environment", "content": "!"}
        return graded(reward, terminated=is_over, observation=observation, error=None if reward else "broken")

    runner = RolloutRunner(
        ScriptedEngine(script),
        {"game": ScriptedEnvironment(judge)},  # type: ignore[dict-item]
        LetterTokenizer(),  # type: ignore[arg-type]
        RolloutLimits(max_sequence_length=200, max_turns=9, timeout_s=20.0),
        loop,
        review=review or ReviewSettings(PENALTIES).make(LetterTokenizer()),
    )
    return runner, prompts(*("?" * number + " " for number in range(len(answers))))


def test_each_penalty_names_the_turns_to_which_it_applies(loop: EventLoopThread) -> None:
    samples = played(loop, WELL, OPEN, EMPTY, UNWANTED, f"{WELL}|{OPEN}|{UNWANTED}|{OPEN}")
    assert [sample.penalties for sample in samples] == [
        {"empty_final_answer": [], "malformed_think_tag": [], "unwanted_tokens": []},
        {"empty_final_answer": [0], "malformed_think_tag": [0], "unwanted_tokens": []},
        {"empty_final_answer": [0], "malformed_think_tag": [], "unwanted_tokens": []},
        {"empty_final_answer": [], "malformed_think_tag": [], "unwanted_tokens": [0]},
        {"empty_final_answer": [1, 3], "malformed_think_tag": [1, 3], "unwanted_tokens": [2]},
    ]
    assert [sample.num_thinking_tokens for sample in samples] == [1, 1, 1, 1, 4]


def test_the_reward_of_the_environment_stays_and_that_for_training_is_at_most_zero(loop: EventLoopThread) -> None:
    good, bad = played(loop, WELL, OPEN, reward=0.75)
    assert (good.reward, good.penalized_reward) == (0.75, 0.75)
    assert (bad.reward, bad.penalized_reward) == (0.75, 0.0)
    (worse,) = played(loop, OPEN, reward=-0.5)
    assert (worse.reward, worse.penalized_reward) == (-0.5, -0.5)
    assert bad.after_penalties(2.0) == 0.0 and bad.after_penalties(-2.0) == -2.0


def test_offending_turns_pay_what_a_penalty_takes_away(loop: EventLoopThread) -> None:
    several, good, single = played(loop, f"{WELL}|{OPEN}|{WELL}|{EMPTY}", f"{WELL}|{WELL}", f"{OPEN}|{WELL}")
    assert several.turn_rewards == [1.0, 1.0, 1.0, 1.0]
    assert several.penalized_turn_rewards == [1.0, -1.0, 1.0, -1.0]
    assert good.penalized_turn_rewards == [1.0, 1.0]
    assert single.penalized_turn_rewards == [-1.0, 1.0]
    for sample in (several, good, single):
        assert sum(sample.penalized_turn_rewards) == sample.penalized_reward
    lost = replace(single, penalties={"late": [7]})
    assert lost.penalized_turn_rewards == [1.0, -1.0]


def test_a_tag_out_of_place_is_found_again_in_the_whole_sequence(loop: EventLoopThread) -> None:
    (sample,) = played(loop, f"{WELL}|a)b|(t")
    tokens = [token for message in sample.message_log for token in message["token_ids"].tolist()]
    assert [chr(tokens[start]) for start, end in sample.malformed_thinking] == [")", "("]
    assert all(end == start + 1 for start, end in sample.malformed_thinking)


def test_a_sample_that_could_not_be_graded_is_not_reviewed(loop: EventLoopThread) -> None:
    (sample,) = played(loop, OPEN, reward=None)
    assert (sample.reward, sample.penalized_reward, sample.penalties) == (None, None, {})
    assert "penalized_rate" not in rollout_metrics([sample])


def test_a_validation_shows_the_reward_of_the_environment_and_the_rates(loop: EventLoopThread) -> None:
    samples = played(loop, WELL, OPEN, phase="validation")
    metrics = validation_metrics(samples, 1)
    assert metrics["accuracy"] == 1.0
    assert metrics["penalized_by_malformed_think_tag"] == 0.5


def test_metrics_count_samples_by_penalty(loop: EventLoopThread) -> None:
    metrics = rollout_metrics(played(loop, WELL, OPEN, f"{EMPTY}|{EMPTY}", UNWANTED))
    assert metrics["penalized_by_empty_final_answer"] == 2 / 4
    assert metrics["penalized_by_malformed_think_tag"] == metrics["malformed_thinking_rate"] == 1 / 4
    assert metrics["penalized_by_unwanted_tokens"] == 1 / 4
    assert metrics["penalized_rate"] == 3 / 4
    assert metrics["reward"] == 5 / 4
    assert metrics["penalized_reward"] == 1 / 4
    assert metrics["mean_thinking_tokens"] == 5 / 4


def test_without_penalties_nothing_is_noted(loop: EventLoopThread) -> None:
    assert ReviewSettings().make(LetterTokenizer()) is nothing
    (sample,) = played(loop, OPEN, review=nothing)
    assert (sample.penalties, sample.num_thinking_tokens, sample.penalized_reward) == ({}, None, 1.0)
    assert not [name for name in rollout_metrics([sample]) if "penal" in name or "thinking" in name]


def test_an_own_penalty_is_made_of_its_arguments(loop: EventLoopThread) -> None:
    own = {"shouting": {"name": f"{__name__}.Shouting", "kwargs": {"most": 2}}}
    section = RewardPenaltyConfig.build(own=own, thinking_tags=["(", ")"])
    loud, calm = played(loop, "(THINK)STOP", "(THINK)Stop", review=ReviewSettings(section).make(LetterTokenizer()))
    assert (loud.penalties, calm.penalties) == ({"shouting": [0]}, {"shouting": []})
    assert rollout_metrics([loud, calm])["penalized_by_shouting"] == 0.5


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"name": f"{__name__}.Shouting"}, "kwargs.most has no value"),
        ({"name": f"{__name__}.Shouting", "kwargs": {"most": 1, "least": 2}}, "kwargs.least is no argument"),
        ({"name": "collections.Counter"}, "it lacks the methods offending"),
        ({"name": "no_such_module.Penalty"}, "no_such_module"),
    ],
)
def test_an_own_penalty_that_cannot_be_used_is_refused(part: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReviewSettings(RewardPenaltyConfig.build(own={"own": part})).make(LetterTokenizer())


def test_an_own_penalty_may_only_name_turns_that_exist(loop: EventLoopThread) -> None:
    section = RewardPenaltyConfig.build(own={"wrong": {"name": f"{__name__}.NoSuchTurn"}})
    with pytest.raises(ValueError, match=r"own.wrong: offending returned the turns \[1\] of an answer with 1"):
        played(loop, WELL, review=ReviewSettings(section).make(LetterTokenizer()))


def test_a_runner_makes_the_same_review_and_sends_its_notes_without_the_tokens(loop: EventLoopThread) -> None:
    settings = pickle.loads(pickle.dumps(ReviewSettings(PENALTIES, {"low": EffortLevelConfig()}, True)))
    answers = (WELL, OPEN, f"{EMPTY}|{WELL}")
    own, remote = (played(loop, *answers, review=made.make(LetterTokenizer())) for made in (
        ReviewSettings(PENALTIES), settings,
    ))  # fmt: skip
    summaries, _ = split([remote], reads_collections=False)
    for sample, summary in zip(own, summaries, strict=True):
        assert summary.message_log[-1]["content"] == ""
        assert (summary.penalties, summary.penalized_reward) == (sample.penalties, sample.penalized_reward)
        assert summary.penalized_turn_rewards == sample.penalized_turn_rewards
        assert summary.num_thinking_tokens == sample.num_thinking_tokens


def test_a_group_that_is_played_alone_ahead_of_its_step_has_the_same_notes(loop: EventLoopThread) -> None:
    answers, key = (WELL, OPEN, f"{WELL}|{EMPTY}"), RolloutKey(1, "train", 1)
    runner, batch = runner_of(loop, *answers)
    tasks = [runner.start_group(batch, row, 2, SAMPLING, key) for row in range(len(answers))]
    alone = [sample for task in tasks for sample in task.result(runner.group_limit_s).trajectories]
    together = [sample for group in runner.stream(batch, 2, SAMPLING, key) for sample in group]
    together.sort(key=lambda sample: (sample.group_index, sample.sample_index))
    assert [sample.penalties for sample in alone] == [sample.penalties for sample in together]
    assert [sample.is_penalized for sample in alone] == [False, False, True, True, True, True]


def test_a_sample_that_finished_before_its_group_was_stored_is_reviewed_with_the_group(loop: EventLoopThread) -> None:
    runner, batch = runner_of(loop, WELL, OPEN)
    key = RolloutKey(1, "train", 1)
    runner_without, _ = runner_of(loop, WELL, OPEN, review=nothing)
    (sample,) = runner_without.start_group(batch, 1, 1, SAMPLING, key).result(20.0).trajectories
    assert sample.penalties == {}
    state = SampleProgress(sample, is_open=True, is_finished=True).state_dict(ResponseSoFar.nothing())
    progress = GroupProgress(stored=[state, None])
    task = runner.start(runner.play_group(batch, 1, 2, SAMPLING, key, progress), "a resumed group")
    assert [each.is_penalized for each in task.result(20.0).trajectories] == [True, True]


def test_the_penalty_that_the_guide_shows_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).resolve().parents[3] / "docs/algorithms/reward-shaping.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(# polite.py\n.*?)```", guide, re.DOTALL)
    (section,) = (text for text in re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL) if "own:" in text)
    (tmp_path / "polite.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = RewardPenaltyConfig.build(**yaml.safe_load(section)["reward_penalties"])
    review = ReviewSettings(config).make(LetterTokenizer())
    assert isinstance(review, AnswerReview)
    for text, offending in (("Four, please.", []), ("Four.", [0])):
        tokens = [ord(letter) for letter in text]
        assert review.judge(tokens, [(0, len(tokens))]).penalties == {"impolite": offending}


def test_a_resumed_run_keeps_the_notes_of_finished_groups(loop: EventLoopThread, tmp_path: Path) -> None:
    (sample,) = played(loop, f"{WELL}|{OPEN}")
    sample.effort = "low"
    torch.save(sample.state_dict(), tmp_path / "state.pt")
    restored = Trajectory.from_state(torch.load(tmp_path / "state.pt", weights_only=True))
    for name in ("penalties", "malformed_thinking", "num_thinking_tokens", "effort", "penalized_reward"):
        assert getattr(restored, name) == getattr(sample, name)
    state = sample.state_dict()
    for name in ("penalties", "malformed_thinking", "num_thinking_tokens", "effort"):
        del state[name]  # as an earlier version has written it
    assert Trajectory.from_state(state).penalized_reward == sample.reward


def test_regrading_stored_samples_finds_the_same_penalties(
    loop: EventLoopThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = played(loop, WELL, OPEN, f"{WELL}|{OPEN}|{UNWANTED}", f"{EMPTY}|{WELL}")
    batch: BatchedDataDict[Any] = build_training_batch(samples, 0, mask_truncated=False)
    TrajectoryLog(tmp_path, enabled=True).write_training(3, samples, batch)
    stored = list(read_samples(tmp_path / "train_data_step3.jsonl"))
    assert [each.row["penalties"] for each in stored] == [sample.penalties for sample in samples]
    assert [each.row["penalized_reward"] for each in stored] == [1.0, 0.0, 0.0, 0.0]
    graded_again = [Regraded(each, "game", reward=each.reward) for each in stored]
    review = ReviewSettings(PENALTIES).make(LetterTokenizer())
    assert isinstance(review, AnswerReview)
    review_again(graded_again, review)
    assert [each.penalties for each in graded_again] == [sample.penalties for sample in samples]
    assert [each.penalized_reward for each in graded_again] == [sample.penalized_reward for sample in samples]
    write_file(tmp_path / "regraded.jsonl", graded_again)
    lines = [json.loads(line) for line in (tmp_path / "regraded.jsonl").read_text().splitlines()]
    assert [line["penalized_reward"] for line in lines] == [1.0, 0.0, 0.0, 0.0]
    write_tables(graded_again)
    assert "3 of 4 training samples are penalized now, 3 were before." in capsys.readouterr().out


def test_turns_of_a_mask_are_its_ones() -> None:
    assert turn_spans([]) == turn_spans([0, 0]) == []
    assert turn_spans([1, 1]) == [(0, 2)]
    assert turn_spans([0, 1, 0, 0, 1, 1]) == [(1, 2), (4, 6)]
