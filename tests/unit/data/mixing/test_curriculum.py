"""Shares by step and by accuracy, against numbers computed by hand."""

from typing import Any

import pytest

from nemo_rl.config import CurriculumConfig
from nemo_rl.data.streams.curriculum import Curriculum, MovingAverage

pytestmark = pytest.mark.fast

PHASES = [
    {"from_step": 0, "weights": {"easy": 1, "hard": 0}},
    {"from_step": 10, "weights": {"easy": 2, "hard": 2}},
    {"from_step": 30, "weights": {"easy": 1, "hard": 3}},
]


def curriculum(weights: dict[str, float] | None = None, **keys: Any) -> Curriculum:
    return Curriculum(weights or {"easy": 1.0, "hard": 1.0}, CurriculumConfig.build(**keys))


def hard_shares(made: Curriculum, steps: list[int]) -> list[float]:
    found = []
    for step in steps:
        made.finish_step(step, [])
        shares = made.shares()
        assert sum(shares.values()) == pytest.approx(1)
        found.append(shares["hard"])
    return found


def test_phases_begin_after_their_steps() -> None:
    assert curriculum(phases=PHASES).shares() == {"easy": 1, "hard": 0}
    steps = [9, 10, 29, 30, 1000]
    assert hard_shares(curriculum(phases=PHASES), steps) == [0, 0.5, 0.5, 0.75, 0.75]


def test_shares_change_evenly_between_phases() -> None:
    found = hard_shares(curriculum(phases=PHASES, interpolation="linear"), [1, 5, 10, 20, 30, 99])
    assert found == pytest.approx([0.05, 0.25, 0.5, 0.625, 0.75, 0.75])


def test_the_moving_average_by_hand() -> None:
    average = MovingAverage(2)
    assert average.value is None
    for value in (1.0, 0.0, 0.5):
        average.add(value)
    assert average.value == pytest.approx((0.25 * 1 + 0.5 * 0 + 1 * 0.5) / 1.75)
    long = MovingAverage(10)
    for _ in range(1000):
        long.add(0.3)
    assert long.value == pytest.approx(0.3)
    assert long.state_dict()[1] == pytest.approx(10)


def solve(made: Curriculum, **accuracies: float) -> None:
    made.finish_step(1, [(name, [1.0] * round(10 * a) + [0.0] * round(10 - 10 * a)) for name, a in accuracies.items()])


def test_shares_by_accuracy_by_hand() -> None:
    weights = {"solved": 1.0, "fits": 1.0, "half": 2.0, "new": 1.0}
    made = curriculum(weights, accuracy={"target": 0.5, "min_share": 0.1})
    assert made.shares() == pytest.approx({"solved": 0.22, "fits": 0.22, "half": 0.34, "new": 0.22})
    solve(made, solved=1.0, fits=0.5, half=0.2)
    # closeness 0, 1, 0.4 and (unknown) 1, times the weights: 0, 1, 0.8, 1 of 2.8; 0.1 of all for each
    expected = {"solved": 0.1, "fits": 0.1 + 0.6 / 2.8, "half": 0.1 + 0.6 * 0.8 / 2.8, "new": 0.1 + 0.6 / 2.8}
    assert made.shares() == pytest.approx(expected)


def test_a_target_off_the_middle_and_data_sets_that_are_all_out_of_reach() -> None:
    made = curriculum(accuracy={"target": 0.8, "min_share": 0.0})
    solve(made, easy=1.0, hard=0.4)
    assert made.shares() == pytest.approx({"easy": 0.75 / 1.25, "hard": 0.5 / 1.25})
    made = curriculum({"easy": 3.0, "hard": 1.0}, accuracy={"min_share": 0.0})
    solve(made, easy=1.0, hard=0.0)
    assert made.shares() == {"easy": 0.75, "hard": 0.25}


def test_phases_and_accuracy_are_multiplied_and_a_data_set_that_is_off_stays_off() -> None:
    made = curriculum(phases=PHASES, accuracy={"min_share": 0.2})
    solve(made, easy=1.0, hard=0.5)
    assert made.shares() == {"easy": 1.0, "hard": 0.0}
    made.finish_step(30, [])
    assert made.shares() == pytest.approx({"easy": 0.2, "hard": 0.8})


def test_only_rewards_above_the_threshold_are_solved_and_groups_without_any_are_left_out() -> None:
    made = curriculum(accuracy={"solved_above": 0.5})
    made.finish_step(1, [("easy", [0.5, 0.6, 1.0, 0.0]), ("easy", []), ("hard", [])])
    metrics = made.metrics()
    assert metrics["recent_accuracy/easy"] == 0.5
    assert "recent_accuracy/hard" not in metrics
    assert metrics["target_share/easy"] == pytest.approx(0.5)


def test_a_restored_curriculum_has_the_same_shares() -> None:
    keys: dict[str, Any] = {"phases": PHASES, "interpolation": "linear", "accuracy": {"average_over": 3}}
    made, fresh = curriculum(**keys), curriculum(**keys)
    for step in range(1, 20):
        made.finish_step(step, [("easy", [1.0, 0.0, 0.0]), ("hard", [float(step % 3 == 0)])])
    fresh.load_state_dict(made.state_dict())
    assert fresh.shares() == made.shares()
    assert fresh.metrics() == made.metrics()
