"""The RLHF chain as a user starts it: each stage improves its own measure, and readers prefer the answers after it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from example_runs import REPOSITORY, run_environment

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(900)]


def test_sft_reward_model_and_grpo_run_in_a_chain(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(REPOSITORY / "examples/rlhf_cpu.sh"), str(tmp_path / "rlhf")]
    environment = run_environment() | {"PATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert len(re.findall(r" -> .* ok$", done.stdout, flags=re.MULTILINE)) == 5
