"""Data sets of programs: rows to tests, and reference solutions that pass them."""

import json

import pytest

from nemo_rl.config import DataConfig
from nemo_rl.config.base.paths import REPOSITORY_ROOT
from nemo_rl.config.schema.env import CodeEnvironmentConfig
from nemo_rl.data.datasets.response_datasets import load_response_dataset
from nemo_rl.data.datasets.setup import setup_response_data
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.kits.code.grading import SolutionGrader, parse_tests
from nemo_rl.sandbox import Limits, Sandbox, why_unavailable
from nemo_rl.sandbox.mechanisms import IN_ORDER
from nemo_rl.utils.errors import DataError

DATA = REPOSITORY_ROOT.parent / "shared" / "data"
LIMITS = Limits(wall_time_s=60, cpu_time_s=60)


def load(name, path):
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    return load_response_dataset({"dataset_name": name, "data_path": str(path), "env_name": "code"})


def failing(rows, solution):
    if all(why_unavailable(one) for one in IN_ORDER):
        pytest.skip("no sandbox works here")
    grader = SolutionGrader(Sandbox(LIMITS))
    pairs = ((solution(row), parse_tests(row["messages"][-1]["content"])) for row in rows)
    return [program for program, tests in pairs if not grader.grade(program, tests).is_right]


def humaneval_solution(row):
    return row["prompt"] + row["canonical_solution"]


def test_example_problems_can_be_read_and_solved():
    data = load("CodeDataset", REPOSITORY_ROOT / "examples/assets/problems/programs.jsonl")
    assert len(data.dataset) == 8 and not data.bad_rows
    solutions = {
        "add": "def add(a, b): return a + b",
        "words": "print(len(input().split()))",
        "sum": "print(sum(map(int, input().split())))",
    }
    rows = {"add": data.dataset[0], "sum": data.dataset[6], "words": data.dataset[7]}
    assert not failing(list(rows.values()), lambda row: next(solutions[key] for key in rows if rows[key] is row))


@pytest.mark.parametrize(
    ("name", "file"), [("humaneval", "humaneval/HumanEval.jsonl.gz"), ("mbpp", "mbpp/mbpp.jsonl.gz")]
)
def test_some_reference_solutions_pass(name, file):
    rows = list(load(name, DATA / file).dataset)[10:60:10]
    assert not failing(rows, humaneval_solution if name == "humaneval" else lambda row: row["code"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "file"), [("humaneval", "humaneval/HumanEval.jsonl.gz"), ("mbpp", "mbpp/mbpp.jsonl.gz")]
)
@pytest.mark.timeout(1800)
def test_all_reference_solutions_pass(name, file):
    rows = list(load(name, DATA / file).dataset)
    assert not failing(rows, humaneval_solution if name == "humaneval" else lambda row: row["code"])


def test_prompts_do_not_show_tests_of_humaneval():
    row = load("humaneval", DATA / "humaneval/HumanEval.jsonl.gz").dataset[0]
    prompt = row["messages"][0]["content"]
    assert "def has_close_elements" in prompt and "assert" not in prompt and row["canonical_solution"] not in prompt


def test_one_test_of_mbpp_is_shown():
    row = load("mbpp", DATA / "mbpp/mbpp.jsonl.gz").dataset[0]
    tests = row["test_list"]
    prompt = row["messages"][0]["content"]
    assert tests[0] in prompt and tests[1] not in prompt


@pytest.mark.parametrize("file", ["code_contests_test.json.gz", "codeforces_test.json.gz"])
def test_contests_are_read_from_both_forms(file):
    data = load("code_contests", DATA / "code_contests" / file)
    assert not data.bad_rows
    assert all(parse_tests(row["messages"][-1]["content"]).inputs for row in data.dataset)


def test_a_contest_problem_is_solved():
    row = load("code_contests", DATA / "code_contests" / "codeforces_test.json.gz").dataset[0]
    solution = "for _ in range(int(input())): print(*sorted(map(int, input().split())))"
    assert not failing([row], lambda _: solution)


def test_the_form_of_the_hub_is_read(tmp_path):
    path = tmp_path / "contests.jsonl"
    groups = {"public_tests": {"input": ["1\n"], "output": ["1\n"]}, "private_tests": {"input": ["2"], "output": ["2"]}}
    path.write_text(json.dumps({"description": "Print the input.", **groups}))
    row = load("code_contests", path).dataset[0]
    assert parse_tests(row["messages"][-1]["content"]).inputs == ("1\n", "2")


def test_rows_without_usable_tests_are_left_out_with_a_reason(tmp_path):
    path = tmp_path / "problems.jsonl"
    bad = [{}, {"tests": []}, {"tests": 3}, {"tests": [{"input": "1"}]}, {"tests": {"inputs": ["1"], "outputs": []}}]
    rows = [{"problem": "?", **row} for row in [{"tests": "assert f() == 1"}, *bad]]
    path.write_text("\n".join(map(json.dumps, rows)))
    data = load("CodeDataset", path)
    assert len(data.dataset) == 1 and len(data.bad_rows) == 5
    assert data.bad_rows[0].reason == "no 'tests'"


REFUSED = {
    "assert f(1) ==": "is no Python",
    "return f(1)\nassert f(1)": "is no Python",
    "import numpy\nassert f(1) == 2": "need the module numpy",
    "print(f(1))": "no check",
    "assert True": "no check",
    "assert (f(1) == 2, 'a tuple is always true')": "no check",
    "def check(candidate):\n    assert candidate(1) == 2": "no check",
    "assert sum([1]) == 1": "no name that only a solution defines",
    "def test_f(tmp_path):\n    assert f(tmp_path)": "test_f has parameters",
    "async def test_f():\n    assert f(1)": "coroutine function",
    "import io, sys\nsys.stdin = io.StringIO('3')\nassert f() == 3": "replace sys.stdin",
    "from unittest import mock\nwith mock.patch('builtins.input'):\n    assert f() == 3": "replace builtins.input",
}
KEPT = (
    "assert f(1) == 2",
    "def check(candidate):\n    assert candidate(1) == 2\ncheck(f)",
    "def check(f):\n    assert f(1) == 2\ncheck(f)",
    "try:\n    import numpy\nexcept ImportError:\n    numpy = None\nassert f(1) == 2",
    "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass",
    "from solution import f\nassert f(1) == 2",
    "def test_f():\n    assert f(1) == 2",
)


def test_rows_whose_tests_cannot_judge_are_left_out_with_a_reason(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(json.dumps({"problem": "?", "tests": [tests]}) for tests in [*KEPT, *REFUSED]))
    data = load("CodeDataset", path)
    assert len(data.dataset) == len(KEPT)
    for row, reason in zip(data.bad_rows, REFUSED.values(), strict=True):
        assert reason in row.reason
    with pytest.raises(DataError, match="cannot judge a solution: the tests have no check"):
        parse_tests({"tests": ["assert True"]})


def test_names_that_python_has_too_can_be_those_of_a_solution(tmp_path):
    path = tmp_path / "problems.jsonl"
    row = {"problem": "?", "tests": {"tests": ["assert sum([1, 2]) == 4"], "names": ["sum"]}}
    path.write_text(json.dumps(row))
    rows = list(load("CodeDataset", path).dataset)
    assert not failing(rows, lambda _: "def sum(xs): return len(xs) + 2")
    assert failing(rows, lambda _: "")


def test_rows_that_expect_more_output_than_allowed_are_left_out(tmp_path):
    path = tmp_path / "problems.jsonl"
    rows = [{"problem": "?", "tests": [{"input": "1", "output": "x" * length}]} for length in (100, 101)]
    path.write_text("\n".join(map(json.dumps, rows)))
    entry = {"dataset_name": "CodeDataset", "data_path": str(path), "env_name": "code"}
    config = DataConfig.build(train=entry, max_input_seq_length=256, max_bad_row_share=0.5)
    tokenizer = get_tokenizer({"name": str(REPOSITORY_ROOT / "examples/assets/tiny-chat")})
    data = setup_response_data(tokenizer, config, {"code": CodeEnvironmentConfig.build(output_bytes=100)})
    assert len(data.train) == 1 and [row.line for row in data.bad_rows] == [2]
    assert "an output of 101 bytes, more than env.code.output_bytes=100" in data.bad_rows[0].reason
    assert len(setup_response_data(tokenizer, config, {"code": CodeEnvironmentConfig.build()}).train) == 2
