"""The chain of all stages, as a user starts it: each stage improves its own measure, the last beats the first."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from example_runs import REPOSITORY, run_environment
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(900)]

SCRIPT = REPOSITORY / "examples/chain_cpu.sh"


def test_sft_dpo_grpo_merge_export_and_eval_run_in_a_chain(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(SCRIPT), str(tmp_path / "chain")]
    environment = run_environment() | {"PATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert len(re.findall(r" -> .* ok$", done.stdout, flags=re.MULTILINE)) == 6
    assert [float(value) <= 1e-4 for value in re.findall(r"log-probabilities: (\S+)", done.stdout)] == [True] * 3
    before, after = (
        json.loads((tmp_path / f"chain/eval_{when}/results.json").read_text())["score"]["value"]
        for when in ("before", "after")
    )
    assert after > before + 0.2
    AutoModelForCausalLM.from_pretrained(tmp_path / "chain/hf")

    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert again.returncode == 2 and "exists; name a new folder" in again.stderr
