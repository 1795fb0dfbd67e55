"""The two Python files of the RLHF chain: points, pairs in the right order, and a win rate that can fall."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.fast

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(scope="module")
def examples() -> tuple[ModuleType, ModuleType]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import rlhf_check
        import rlhf_data
    finally:
        sys.path.remove(str(EXAMPLES))
    return rlhf_data, rlhf_check


def test_answers_have_the_points_that_they_were_written_for(examples) -> None:
    data, _ = examples
    for left, right in ((37, 85), (12, 13), (99, 99), (10, 10)):
        assert [data.preference(f"{left}+{right}=", text) for text in data.answers(left, right)] == [0, 1, 2, 3]
    assert data.preference("1+1=", "no idea") == 0


def test_the_preferred_answer_of_a_pair_has_more_points(examples) -> None:
    data, _ = examples
    for row in data.pairs(50):
        assert data.preference(row["prompt"], row["chosen"]) > data.preference(row["prompt"], row["rejected"])


@pytest.mark.parametrize(("after", "status"), [((3, 3), 0), ((3, 1), 0), ((1, 0), 1), ((2, 2), 0)])
def test_the_win_rate_is_that_of_the_answers_after(examples, tmp_path: Path, capsys, after, status) -> None:
    data, check = examples
    run = tmp_path / "exp_001"
    run.mkdir()
    for step, points in ((0, (1, 1)), (8, (0, 0)), (10, after)):
        rows = [
            {
                "idx": idx,
                "sample": 0,
                "content": [
                    {"role": "user", "content": "<user>37+85=<assistant>"},
                    {"role": "assistant", "content": data.answers(37, 85)[point]},
                ],
            }
            for idx, point in enumerate(points)
        ]
        (run / f"val_data_step{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert check.main([str(tmp_path)]) == status
    assert f"{sum(after) / 2:8.4f}" in capsys.readouterr().out
