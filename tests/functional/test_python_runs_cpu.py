"""Runs from Python: `nemo_rl.grpo` and its like train, evaluate, show what a reward did wrong, and end cleanly."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from example_runs import REPOSITORY, run_environment

pytestmark = pytest.mark.ray

ROWS = """
import nemo_rl

rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 40) for b in range(10, 40)]
"""
SNIPPET = f"""{ROWS}
run = nemo_rl.grpo(
    "tiny-chat", rows[64:], validation=rows[:64], reward=lambda answer, row: float(row["answer"] in answer), steps=STEPS
)
print(run.metrics["validation/accuracy"], run.folder)
"""


def run_code(code: str, folder: Path, timeout_s: float = 200, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder of its own, as a user does."""
    (folder / "program.py").write_text(code, encoding="utf-8")
    environment = run_environment() | variables
    return subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s
    )


@pytest.mark.timeout(240)
def test_ten_lines_train_with_a_lambda(tmp_path: Path) -> None:
    code = SNIPPET.replace(
        "steps=STEPS", 'steps=1, **{"policy.generation.backend": "hf", "policy.optimizer.kwargs.lr": 2e-4}'
    )
    done = run_code(code + "print(run.model.is_dir(), len(run.metrics.columns['step']))", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    accuracy, folder, is_there, num_steps = done.stdout.split()
    assert 0 < float(accuracy) <= 1
    assert folder == str(tmp_path / "results/grpo_001")
    assert (is_there, num_steps) == ("True", "2")
    assert "step 1/1" in done.stderr
    assert "lr=0.0002" in done.stderr
    assert not list(tmp_path.glob("logs"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_snippet_learns(tmp_path: Path) -> None:
    done = run_code(SNIPPET.replace("STEPS", "20"), tmp_path, 390)
    assert done.returncode == 0, done.stderr[-3000:]
    accuracies = [float(found) for found in re.findall(r"validation after step \d+: accuracy=([\d.]+)", done.stderr)]
    assert float(done.stdout.split()[0]) > accuracies[0] + 0.2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_several_rewards_supervised_runs_and_evaluation_in_one_program(tmp_path: Path) -> None:
    """One process: coroutine, lists and weights, rows as a data set and a file, then SFT, DPO and an evaluation."""
    code = f"""{ROWS}
import asyncio, datasets, json, pathlib

HF = {{"policy.generation.backend": "hf"}}

async def right(answer, row):
    await asyncio.sleep(0)
    return row["answer"] in answer

def short(answers, rows):
    assert len(answers) == len(rows)
    return [-len(answer) for answer in answers]

table = datasets.Dataset.from_list(rows)
run = nemo_rl.grpo("tiny-chat", table, reward={{"right": right, "short": (short, 0.01)}}, steps=1, **HF)
print("components", run.metrics["train/right"], run.metrics["train/short"])

pathlib.Path("rows.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
run = nemo_rl.grpo("tiny-chat", "rows.jsonl", steps=1, **HF)

answers = [{{"prompt": row["prompt"], "answer": row["answer"]}} for row in rows]
tuned = nemo_rl.sft("tiny-chat", answers[64:], validation=answers[:64], steps=2)
print("sft", tuned.metrics["validation/loss"] if "validation/loss" in tuned.metrics else sorted(tuned.metrics)[:40])
pairs = [{{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "0"}} for row in rows]
nemo_rl.dpo(tuned.model, pairs, steps=1)
scores = nemo_rl.evaluate(tuned.model, rows[:32], reward=lambda answer, row: float(row["answer"] in answer))
print("eval", scores.metrics, sorted(scores.metrics), scores.folder)
"""
    done = run_code(code, tmp_path, 390)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "components" in done.stdout
    assert "eval" in done.stdout
    names = {path.name for path in (tmp_path / "results").iterdir()}
    assert {"grpo_001", "grpo_002", "sft_001", "dpo_001", "eval_001"} <= names


@pytest.mark.timeout(240)
def test_a_reward_with_a_mistake_ends_the_run_before_engines_start(tmp_path: Path) -> None:
    code = f"""{ROWS}
nemo_rl.grpo("tiny-chat", rows, reward={{"right": lambda answer, row: row["truth"]}}, steps=1)
"""
    done = run_code(code, tmp_path)
    assert done.returncode == 1
    assert "KeyError: 'truth'" in done.stderr
    assert "in the reward 'right'" in done.stderr
    assert "step 1" not in done.stderr


@pytest.mark.timeout(240)
def test_a_reward_that_fails_for_some_answers_is_an_error_of_these(tmp_path: Path) -> None:
    code = f"""{ROWS}
def odd(answer, row):
    if len(answer) % 2:
        raise ValueError("an odd answer")
    return 1.0 * (row["answer"] in answer)

run = nemo_rl.grpo("tiny-chat", rows, reward=odd, steps=1, **{{"policy.generation.backend": "hf"}})
print(run.metrics["train/num_reward_errors"])
"""
    done = run_code(code, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert 0 < float(done.stdout) < 64
    assert "an odd answer" in done.stderr
    assert "in the reward 'odd'" in done.stderr


INTERRUPTED = f"""{ROWS}
import builtins, signal

builtins.__IPYTHON__ = True  # as in a notebook
before = signal.getsignal(signal.SIGTERM)
try:
    nemo_rl.grpo("tiny-chat", rows, reward=lambda answer, row: 1.0 * len(answer), steps=1000)
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGTERM) == before, flush=True)
    input()
"""


@pytest.mark.timeout(240)
def test_an_interrupt_of_a_notebook_ends_all_processes(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(INTERRUPTED, encoding="utf-8")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "program.py"],
            cwd=tmp_path,
            env=run_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        assert process.stdout is not None
        end = time.monotonic() + 180
        while b"step 2/1000" not in (tmp_path / "log").read_bytes():
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.1)
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) > 4
        os.kill(process.pid, signal.SIGINT)
        assert process.stdout.readline() == b"interrupted True\n"
        _, left = psutil.wait_procs(started, timeout=20)
        assert left == []
        process.communicate(b"\n", timeout=30)
    assert process.returncode == 0


@pytest.mark.timeout(240)
def test_the_files_of_init_train(tmp_path: Path) -> None:
    """Both files are used from their folder, and the reward of the file is that of the run."""
    program = [sys.executable, "-m", "nemo_rl"]
    subprocess.run([*program, "init", "mine"], cwd=tmp_path, env=run_environment(), check=True, timeout=60)
    command = [*program, "grpo", "--config", "my_run.yaml", "grpo.max_num_steps=1", "policy.generation.backend=hf"]
    done = subprocess.run(
        command, cwd=tmp_path / "mine", env=run_environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = (tmp_path / "mine").glob("logs/my_run/exp_001/metrics.jsonl")
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    first = next(row["metrics"] for row in rows if row["prefix"] == "validation")
    assert 0.2 < first["accuracy"] < 0.8
    again = subprocess.run([*program, "init", "mine"], cwd=tmp_path, env=run_environment(), timeout=60)
    assert again.returncode == 2


@pytest.mark.timeout(400)
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    """Its cells run in order in a fresh process, in a folder of their own."""
    notebook = json.loads((REPOSITORY / "examples/python_run.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in notebook["cells"] if cell["cell_type"] == "code")
    done = run_code("\n\n".join(cells), tmp_path, 390)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
