"""The comparison of recorded runs finds every changed number."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from tool_loading import load_tool

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def golden_runs() -> ModuleType:
    return load_tool("golden_runs")


def write(folder: Path, *rows: tuple[str, int, dict[str, float]]) -> None:
    path = folder / "sft/logs/exp_001/metrics.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps({"prefix": p, "step": s, "metrics": m}) + "\n" for p, s, m in rows))


def test_runs_that_differ_only_in_times_are_equal(golden_runs, tmp_path, capsys):
    write(tmp_path / "a", ("train", 1, {"loss": 0.1, "sync_s": 1.0}), ("timing/train", 1, {"total": 3.0}))
    write(tmp_path / "b", ("train", 1, {"loss": 0.1, "sync_s": 2.0}), ("timing/train", 1, {"total": 4.0}))
    assert golden_runs.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == "sft: 1 and 1 numbers, 0 differ\n"


@pytest.mark.parametrize("other", [{"loss": 0.1000000001}, {"lr": 0.1}, {}])
def test_a_changed_or_missing_number_is_found(golden_runs, tmp_path, other):
    write(tmp_path / "a", ("train", 1, {"loss": 0.1}))
    write(tmp_path / "b", ("train", 1, other))
    assert golden_runs.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1


def test_a_run_without_numbers_is_not_equal(golden_runs, tmp_path):
    write(tmp_path / "a", ("train", 1, {}))
    write(tmp_path / "b", ("train", 1, {}))
    assert golden_runs.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
