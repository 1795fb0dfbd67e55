"""The benchmarks of the driver run with the parts of a step as they are now."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(*command: str) -> str:
    """Run a tool and return what it printed."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    "program", ["driver_at_scale", pytest.param("runners_at_scale", marks=[pytest.mark.ray, pytest.mark.long])]
)
def test_a_small_step_is_measured(program: str) -> None:
    said = run(f"tools/benchmarks/{program}.py", "--samples", "64", "--tokens", "16", "--steps", "1")
    figures = re.search(r"64 samples of 16 tokens, .*all (\d+\.\d+)", said)
    assert figures and float(figures.group(1)) > 0


@pytest.mark.long
@pytest.mark.ray
def test_the_start_of_a_few_stand_ins_is_measured() -> None:
    said = run(
        "tools/benchmarks/simulation/start_at_scale.py", "--workers", "9", "--start-s", "0.2", "--build-s", "0.1"
    )
    seconds = dict(re.findall(r"9 workers  (\S.*?)  +(\d+\.\d+) s", said))
    assert float(seconds["group"]) >= float(seconds["- slowest stand-in"]) >= 0.2
    assert {"places reserved", "a call of all", "a call with rows", "end"} <= seconds.keys()
