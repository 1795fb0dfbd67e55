"""The benchmarks of the driver run with the parts of a step as they are now."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("program", ["driver_at_scale", pytest.param("runners_at_scale", marks=pytest.mark.ray)])
def test_a_small_step_is_measured(program: str) -> None:
    done = subprocess.run(
        [sys.executable, f"tools/benchmarks/{program}.py", "--samples", "64", "--tokens", "16", "--steps", "1"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = re.search(r"64 samples of 16 tokens, .*all (\d+\.\d+)", done.stdout)
    assert figures and float(figures.group(1)) > 0
