"""`tools/engine_mismatch.py` names the first operation at which an engine and the trainer differ."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools/engine_mismatch.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("engine_mismatch", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_changed_operation_is_named(tool: ModuleType) -> None:
    q, k, v = (torch.arange(6.0).view(3, 2) + number for number in range(3))
    joined = torch.cat([q, k, v], -1)
    ours = tool.Recorded({"a.0.self_attn.q_proj": [q], "a.0.self_attn.k_proj": [k], "a.0.self_attn.v_proj": [v]})
    theirs = tool.Recorded({"a.0.self_attn.qkv_proj": [joined.clone()]})
    assert tool.first_difference(["a.0"], ours, theirs) == "no difference"
    theirs.outputs["a.0.self_attn.qkv_proj"][0][1, 2] += 0.7
    assert "a.0, self_attn.qkv_proj (1.0e-01, 94.4% equal)" in tool.first_difference(["a.0"], ours, theirs)
    assert "| self_attn.qkv_proj | 94.4% | 94.4% | 1.0e-01 | 1.0e-01 |" in list(tool.table(["a.0"], ours, theirs))


def test_the_engine_without_mismatch_has_no_difference() -> None:
    command = [sys.executable, str(TOOL), "examples/assets/tiny-chat", "--engine", "hf", "--zero-mismatch"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "2"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "no difference" in done.stdout
    assert done.stdout.count("| mlp.down_proj | 100.0% | 100.0% | 0.0e+00 | 0.0e+00 |") == 2


def test_layers_with_other_names_are_refused(tool: ModuleType) -> None:
    ours = tool.Recorded({"a.0": [torch.zeros(3, 2)], "a.0.mlp.down_proj": [torch.zeros(3, 2)]})
    theirs = tool.Recorded({"a.0": [torch.zeros(3, 2)], "a.0.mlp.linear_fc2": [torch.zeros(3, 2)]})
    with pytest.raises(SystemExit, match="Of a.0, only 1 operations have the same names"):
        tool.require_pairs(["a.0"], ours, theirs)
