"""Fixtures that start the example scripts."""

from collections.abc import Iterator
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
def grpo_example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GRPOExample]:
    """Run the CPU example for eight steps, kill it in the last one and resume from step 4; once for all tests."""
    folder = tmp_path_factory.mktemp("grpo")
    runs = ExampleRuns(folder)
    overrides = ("grpo.max_num_steps=8", "checkpointing.save_period=4", "grpo.val_period=2")
    metrics = killed_and_resumed(runs.start, "run_grpo.py", "grpo_math_cpu.yaml", overrides, folder, steps=8)
    console = "\n".join(log.read_text(errors="replace") for log in folder.glob("*.log"))
    yield GRPOExample(metrics, folder / "checkpoints/step_8", max(console.splitlines(), key=len))
    runs.close()
