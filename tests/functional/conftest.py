"""Fixtures that start the example scripts."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_runs import REPOSITORY, ExampleRun, StartExample, run_environment


@pytest.fixture
def start_example(tmp_path: Path) -> Iterator[StartExample]:
    """Start `examples/<script>` with overrides; all runs are ended when the test is over."""
    runs: list[ExampleRun] = []

    def start(script: str, config: str, *overrides: str, logs: str = "logs") -> ExampleRun:
        log_dir = tmp_path / logs
        log_path = tmp_path / f"console_{len(runs)}.log"
        command = [sys.executable, str(REPOSITORY / "examples" / script)]
        command += ["--config", str(REPOSITORY / "examples/configs" / config)]
        command += [f"logger.log_dir={log_dir}", *overrides]
        with log_path.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT, env=run_environment()
            )
        runs.append(ExampleRun(process, log_path, log_dir))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.terminate()
            try:
                run.process.wait(30)
            except subprocess.TimeoutExpired:
                run.process.kill()
