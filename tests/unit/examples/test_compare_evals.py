"""The statistics of `examples/use_cases/compare_evals.py` against values that were computed in another way."""

import json
import math
import sys
from itertools import product
from pathlib import Path
from statistics import fmean

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples/use_cases"))

import compare_evals  # noqa: E402


def write(folder: Path, grades: dict[int, list[float | None]]) -> Path:
    folder.mkdir()
    rows = [
        {"idx": idx, "sample": number, "reward": reward}
        for idx, rewards in grades.items()
        for number, reward in enumerate(rewards)
    ]
    (folder / "evaluation_data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(("successes", "trials"), [(8, 10), (0, 20), (128, 128), (55, 128)])
def test_the_ends_of_the_interval_solve_its_definition(successes: int, trials: int) -> None:
    """Wilson's ends are the shares p for which the observed share is z standard errors away."""
    for end in compare_evals.wilson(successes, trials):
        away = abs(successes / trials - end)
        assert away == pytest.approx(compare_evals.Z * math.sqrt(end * (1 - end) / trials), abs=1e-9)


def test_the_test_of_signs_equals_all_assignments() -> None:
    differences = [0.25, 0.5, -0.25, 0.75, 0.5, 0.25, 0.0, 0.5]
    total = abs(sum(differences))
    every = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in product((-1, 1), repeat=8)]
    exact = fmean(value >= total - 1e-12 for value in every)
    assert compare_evals.sign_flip_test(differences) == pytest.approx(exact, abs=0.01)


def test_the_bootstrap_has_the_width_of_the_normal_interval() -> None:
    values = [float(number % 4 == 0) for number in range(400)]
    low, high = compare_evals.bootstrap(values)
    error = math.sqrt(0.25 * 0.75 / 400)
    assert low == pytest.approx(0.25 - 1.96 * error, abs=0.006)
    assert high == pytest.approx(0.25 + 1.96 * error, abs=0.006)


def test_the_report_has_the_numbers_of_both_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write(tmp_path / "a", {0: [0.0, 1.0], 1: [0.0, 0.0], 2: [1.0, None]})
    after = write(tmp_path / "b", {0: [1.0, 1.0], 1: [1.0, 0.0], 2: [1.0, 0.0]})
    assert compare_evals.main([str(before), str(after)]) == 0
    printed = capsys.readouterr().out
    assert "3 prompts, 2 answers each" in printed
    assert "pass@1 0.333" in printed and "pass@1 0.667" in printed
    assert "pass@2 0.667" in printed and "pass@2 1.000" in printed
    assert "difference +0.333" in printed and "2 prompts better, 0 worse, 1 equal" in printed


def test_other_prompts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = write(tmp_path / "a", {0: [1.0]}), write(tmp_path / "b", {1: [1.0]})
    assert compare_evals.main([str(before), str(after)]) == 2
    assert "different prompts" in capsys.readouterr().err
