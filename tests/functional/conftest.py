"""Fixtures that start the example scripts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from example_runs import ExampleRuns, GRPOExample, StartExample, killed_and_resumed


@pytest.fixture
def start_example(tmp_path: Path) -> Iterator[StartExample]:
    """Start `examples/<script>` with overrides; all runs are ended when the test is over."""
    runs = ExampleRuns(tmp_path)
    yield runs.start
    runs.close()


@pytest.fixture(scope="session")
def grpo_example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GRPOExample]:
    """Eight steps of the CPU example, killed in the last one and resumed from step 4; made once for all tests."""
    folder = tmp_path_factory.mktemp("grpo")
    runs = ExampleRuns(folder)
    overrides = ("grpo.max_num_steps=8", "checkpointing.save_period=4", "grpo.val_period=2")
    metrics = killed_and_resumed(runs.start, "run_grpo.py", "grpo_math_cpu.yaml", overrides, folder, steps=8)
    console = "\n".join(log.read_text(errors="replace") for log in folder.glob("*.log"))
    yield GRPOExample(metrics, folder / "checkpoints/step_8", max(console.splitlines(), key=len))
    runs.close()
