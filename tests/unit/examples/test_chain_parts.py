"""The two Python files of the chain: the data is correct or wrong as labelled, and the check can fail."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from nemo_rl.config.schema.data import DatasetConfig
from nemo_rl.data.datasets.arithmetic import is_validation
from nemo_rl.data.datasets.preference_datasets import load_preference_dataset
from nemo_rl.data.datasets.response_datasets import load_response_dataset

pytestmark = pytest.mark.fast

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chain") / "data"
    load("chain_data").main([str(folder)])
    return folder


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def numbers(question: str) -> list[int]:
    return [int(number) for number in question.rstrip("=").split("+")]


def boxed(answer: str) -> int:
    return int(re.fullmatch(r"\d\+\d=\d+, \d\+\d(?:\+1)?=\d+, \\boxed\{(\d+)\}", answer)[1])


def test_labels_tell_correct_from_wrong_sums(folder: Path) -> None:
    answers = rows(folder / "answers.jsonl")
    assert [row["label"] for row in answers] == [boxed(r["completion"]) == sum(numbers(r["prompt"])) for r in answers]
    assert sum(row["label"] for row in answers) == len(answers) / 2


def test_chats_are_correct_and_pairs_have_one_wrong_answer(folder: Path) -> None:
    for row in rows(folder / "chats.jsonl"):
        question, answer = (message["content"] for message in row["messages"])
        assert boxed(answer) == sum(numbers(question))
    for row in rows(folder / "pairs.jsonl"):
        assert boxed(row["chosen"]) == sum(numbers(row["prompt"]))
        assert abs(boxed(row["rejected"]) - sum(numbers(row["prompt"]))) == 10
    chain_data = load("chain_data")
    assert chain_data.worked(37, 85) == r"7+5=12, 3+8+1=12, \boxed{122}"
    assert chain_data.worked(37, 85, carry_slip=True) == r"7+5=12, 3+8=11, \boxed{112}"
    assert chain_data.worked(12, 34, carry_slip=True) == r"2+4=6, 1+3+1=5, \boxed{56}"


def test_no_evaluated_problem_is_in_the_training_data(folder: Path) -> None:
    asked = [row["messages"][0]["content"] for row in rows(folder / "chats.jsonl")]
    asked += [row["prompt"] for row in rows(folder / "pairs.jsonl")]
    assert len(asked) == 6000
    assert not is_validation(np.array([numbers(question) for question in asked])).any()


def test_the_library_loads_the_written_files(folder: Path) -> None:
    chats = DatasetConfig.build(dataset_name="openai_format", data_path=str(folder / "chats.jsonl"))
    pairs = DatasetConfig.build(dataset_name="BinaryPreferenceDataset", data_path=str(folder / "pairs.jsonl"))
    for data, expected in (
        (load_response_dataset(chats, "train"), 4000),
        (load_preference_dataset(pairs, "train"), 2000),
    ):
        assert (len(data.dataset), data.bad_rows) == (expected, [])


def write_run(folder: Path, values: list[float]) -> None:
    lines = [
        json.dumps({"step": step, "prefix": "train", "metrics": {"reward": value, "loss": 0.0}})
        for step, value in enumerate(values, start=1)
    ]
    (folder / "exp_001").mkdir(parents=True)
    (folder / "exp_001/metrics.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("direction", "flags", "status"),
    [
        ("rises", [], 0),
        ("falls", [], 1),
        ("rises", ["--window", "2"], 1),
        ("falls", ["--window", "2"], 0),
        ("rises", ["--window", "3"], 1),
    ],
)
def test_the_check_compares_first_and_last_values(direction, flags, status, tmp_path, capsys) -> None:
    write_run(tmp_path, [0.4, 0.9, 0.2, 0.5])
    assert load("chain_check").main(["train/reward", direction, str(tmp_path), *flags]) == status
    if flags == []:
        assert "0.4000 ->   0.5000" in capsys.readouterr().out


def test_the_check_refuses_missing_values(tmp_path, capsys) -> None:
    write_run(tmp_path / "run", [0.4])
    assert load("chain_check").main(["train/reward", "rises", str(tmp_path / "run")]) == 1
    assert "train/reward: 1 values in" in capsys.readouterr().err


def test_the_check_compares_evaluations(tmp_path) -> None:
    for name, value in (("before", 0.4), ("after", 0.7)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps({"score": {"value": value}}))
    folders = [str(tmp_path / name) for name in ("before", "after")]
    assert load("chain_check").main(["score", "rises", *folders]) == 0
    assert load("chain_check").main(["score", "rises", *folders[::-1]]) == 1
