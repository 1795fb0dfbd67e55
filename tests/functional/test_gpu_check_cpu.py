"""`tools/gpu_check.py` as users start it, on the CPU, as if Ray and vLLM were not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))
from gpu_checks.plan import CHECKS  # noqa: E402

WITHOUT_RAY_AND_VLLM = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in ("ray", "vllm")
        return None if hidden else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


@pytest.fixture
def bare(tmp_path) -> dict[str, str]:
    """Return an environment in which neither package is found, also not by child processes."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITHOUT_RAY_AND_VLLM)
    environment = os.environ | {"PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    for package in ("ray", "vllm"):
        found = subprocess.run([sys.executable, "-c", f"import {package}"], env=environment, capture_output=True)
        assert b"ModuleNotFoundError" in found.stderr
    return environment


def _run(bare: dict[str, str], tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "rows.json"
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--json", str(file), *arguments]
    done = subprocess.run(command, env=bare, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    print(done.stdout, done.stderr)
    return done.returncode, json.loads(file.read_text())


@pytest.mark.long
def test_every_check_holds_on_a_cpu(bare, tmp_path) -> None:
    status, report = _run(bare, tmp_path, "--cpu")
    assert [row for row in report["rows"] if row["status"] != "ok"] == []
    assert status == 0
    assert list(dict.fromkeys(row["check"] for row in report["rows"])) == [check.name for check in CHECKS]
    rows = {f"{row['check']}: {row['name']}": row["figures"] for row in report["rows"]}
    assert rows["weight sync: shared_memory: fingerprints"]["tensors"] == 26
    assert rows["checkpoint: a new rank loads it"] == {"tensors": 104, "differ": 0}
    assert 0 < rows["policy: log-probs, qwen2, float32"]["packed"] < 1e-4
    assert rows["training step: packs of 256"]["tokens_per_s"] > 0
    assert report["machine"]["torch"]


def test_a_planted_fault_is_found(bare, tmp_path) -> None:
    status, report = _run(bare, tmp_path, "--cpu", "--plant-fault", "--only", "large model")
    assert status == 1
    [row] = report["rows"]
    assert (row["check"], row["status"]) == ("large model", "failed")
    assert row["figures"]["packed"] > row["figures"]["allowed"]
