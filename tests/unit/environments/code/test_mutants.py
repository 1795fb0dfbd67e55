"""Changed reference solutions of HumanEval and MBPP get the reward that a plain Python run of their tests gives."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mutants import mutants

from nemo_rl.config.base.paths import REPOSITORY_ROOT
from nemo_rl.data.datasets.response_datasets import load_response_dataset
from nemo_rl.kits.code.grading import CallTests, SolutionGrader, parse_tests
from nemo_rl.sandbox import Limits, Sandbox, why_unavailable
from nemo_rl.sandbox.mechanisms import IN_ORDER

DATA = REPOSITORY_ROOT.parent / "shared" / "data"
FILES = {"humaneval": "humaneval/HumanEval.jsonl.gz", "mbpp": "mbpp/mbpp.jsonl.gz"}


def cases(name, step, count):
    """Return tests, program and plain program of each mutant of every `step`-th row."""
    path = DATA / FILES[name]
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    if all(why_unavailable(one) for one in IN_ORDER):
        pytest.skip("no sandbox works here")
    found = []
    rows = load_response_dataset({"dataset_name": name, "data_path": str(path), "env_name": "code"}).dataset
    for row in list(rows)[::step]:
        tests = parse_tests(row["messages"][-1]["content"])
        assert isinstance(tests, CallTests)
        code = row["prompt"] + row["canonical_solution"] if name == "humaneval" else row["code"]
        setup = "" if name == "humaneval" else tests.setup
        for mutant in mutants(code, row.get("entry_point"), count, str(row["task_id"])):
            found.append((row["task_id"], tests, mutant, "\n".join([setup, mutant, *tests.tests])))
    return found


def plain(programs):
    command = [sys.executable, str(Path(__file__).parent / "mutants.py")]
    ended = subprocess.run(command, input=json.dumps(programs), capture_output=True, text=True, check=True)
    return json.loads(ended.stdout)


def compare(name, step, count):
    found = cases(name, step, count)
    expected = plain([program for *_, program in found])
    grader = SolutionGrader(Sandbox(Limits(wall_time_s=20, cpu_time_s=10, memory_mb=1024)))
    with ThreadPoolExecutor(2) as threads:
        verdicts = list(threads.map(lambda one: grader.grade(one[2], one[1]), found))
    differing = [
        (task, mutant, verdict, wanted)
        for (task, _, mutant, _), verdict, wanted in zip(found, verdicts, expected, strict=True)
        if verdict.is_right != wanted
    ]
    assert 0 < sum(expected) < len(expected)  # some changes change nothing
    return len(found), differing


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FILES)
def test_some_mutants_get_what_plain_python_says(name):
    num_mutants, differing = compare(name, 16 if name == "humaneval" else 90, 2)
    assert num_mutants >= 15 and not differing


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", FILES)
def test_mutants_get_what_plain_python_says(name):
    num_mutants, differing = compare(name, 1, 4)
    assert num_mutants > 600 and not differing
