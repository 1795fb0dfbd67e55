"""`tools/gpu_check.py` on a GPU: every row that reports a correctness check passes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = Path(__file__).resolve().parents[2]


def test_every_check_holds_on_a_gpu(tmp_path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--json", str(file), "--workdir", str(tmp_path)]
    status = subprocess.run(command, timeout=580).returncode
    rows = json.loads(file.read_text())["rows"]
    assert [row for row in rows if row["status"] != "ok"] == []
    assert status == 0
    assert all(row["figures"]["kernel"] == "flash" for row in rows if row["name"].startswith("bfloat16, window"))
