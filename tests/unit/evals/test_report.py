"""The scores of a report and the block on the console."""

import dataclasses

import pytest
from eval_helpers import eval_config

from nemo_rl.evals.records import AnswerRecord
from nemo_rl.evals.report import format_report, make_report

pytestmark = pytest.mark.fast


def _records(rewards: list[list[float | None]], answers: list[list[str | None]]) -> list[AnswerRecord]:
    return [
        AnswerRecord(
            idx=idx,
            sample=sample,
            prompt="p",
            response="r",
            ground_truth="1",
            answer=answer,
            reward=reward,
            outcome="finished" if reward is not None else "reward_error",
            response_length=10,
            topic=("algebra", "geometry")[idx % 2],
        )
        for idx, group in enumerate(rewards)
        for sample, (reward, answer) in enumerate(zip(group, answers[idx], strict=True))
    ]


REWARDS = [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, None]]
ANSWERS = [["1", "2"], ["3", None], ["1", "\\text{1}"], ["2", None]]


def test_scores_equal_hand_computed_values() -> None:
    report = make_report(eval_config("eval.num_tests_per_prompt=2"), _records(REWARDS, ANSWERS))
    assert report.score.value == pytest.approx((0.5 + 0 + 1 + 0) / 4)
    assert report.score.standard_error == pytest.approx((0.6875 / 3 / 4) ** 0.5)
    assert report.companions["pass@2"].value == pytest.approx(2 / 4)
    # Of the tie between 1 and 2 the first wins; 3 and 2 are wrong, and so is None.
    assert report.companions["cons@2"].value == pytest.approx((1 + 0 + 1 + 0) / 4)
    assert "pass@1" not in report.companions
    assert report.topics["algebra"].value == pytest.approx(0.75)
    assert report.topics["geometry"].value == 0.0
    assert report.answers["num_not_graded"] == 1
    assert report.answers["without_answer_share"] == pytest.approx(2 / 8)


def test_an_empty_report_has_no_nan() -> None:
    report = make_report(eval_config("eval.num_tests_per_prompt=2"), [])
    numbers = [report.score.value, report.score.standard_error, *report.answers.values()]
    assert numbers == [0.0] * len(numbers)


def test_the_report_has_settings_metric_and_score() -> None:
    records = [dataclasses.replace(record, topic=None) for record in _records([[1.0], [0.0], [1.0]], [["1"]] * 3)]
    overrides = ("eval.num_tests_per_prompt=1", "generation.temperature=0", "data.num_samples=3")
    block = format_report(make_report(eval_config(*overrides), records)).splitlines()
    assert block[0] == block[-1] == "=" * 60
    assert block[1].endswith("tiny-chat' dataset_name='arithmetic'")
    assert block[2] == "max_new_tokens=128 temperature=0.0 top_p=1.0 top_k=-1 seed=42"
    assert "metric=pass@1 num_tests_per_prompt=1" in block
    assert "score=0.6667 (2/3)" in block
    assert not any("topic" in line or "cons@" in line for line in block)


def test_the_report_shows_topics() -> None:
    block = format_report(make_report(eval_config("eval.num_tests_per_prompt=2"), _records(REWARDS, ANSWERS)))
    assert "pass@1 by topic\nalgebra   0.7500 of 2\ngeometry  0.0000 of 2" in block
