"""The research script learns with its own data set, environment and loss through `setup`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from example_runs import REPOSITORY, run_environment

SCRIPT = REPOSITORY / "examples/own_research.py"


def test_the_script_stays_short() -> None:
    """Sixty lines of code, without its texts."""
    text = re.sub(r'"""(?:.|\n)*?"""', "", SCRIPT.read_text(encoding="utf-8"))
    imports = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    code = [line for line in text.splitlines() if line.strip()]
    assert len(code) - len(imports) <= 60


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(240)
@pytest.mark.long
def test_the_policy_learns_what_the_script_rewards(tmp_path: Path) -> None:
    """The second number is not rewarded directly, but rises with the rewarded one."""
    command = [sys.executable, str(SCRIPT), "grpo.max_num_steps=4", "grpo.val_period=4"]
    done = subprocess.run(command, cwd=tmp_path, env=run_environment(), capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = tmp_path.glob("logs/exp_*/metrics.jsonl")
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    before, after = (row["metrics"] for row in rows if row["prefix"] == "validation")
    assert after["accuracy"] > before["accuracy"] + 0.05
    assert after["diligence/right"] > before["diligence/right"]
    rewards = [row["metrics"]["reward"] for row in rows if row["prefix"] == "train"]
    assert len(rewards) == 4
    assert rewards[-1] > rewards[0]
