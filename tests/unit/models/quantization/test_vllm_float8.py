"""Float8 tensors as vLLM's installed source reads them; vLLM is imported in a separate process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TinyShape, make_char_tokenizer, make_tiny_model, save_tiny_checkpoint

from nemo_rl.models.generation.vllm.settings import engine_environment

pytestmark = [pytest.mark.vllm, pytest.mark.long]

SHAPE = TinyShape(
    hidden_size=256,
    intermediate_size=384,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    max_positions=128,
    tie_embeddings=False,
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("model")
    model = make_tiny_model("qwen2", SHAPE, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)  # so that next-token distributions are far from uniform
    save_tiny_checkpoint(folder, model, make_char_tokenizer())
    paths = os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)])
    script = Path(__file__).with_name("vllm_float8.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(folder / "meeting")],
        env=os.environ | engine_environment("cpu") | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_quantized_matrices_are_those_of_vllm_bit_for_bit(found: dict[str, Any]) -> None:
    assert len(found["quantizers"]) == 10 and all(found["quantizers"].values()), found["quantizers"]


@pytest.mark.parametrize(("name", "suffix", "dtype"), [("fp8", "_inv", torch.float32), ("mxfp8", "", torch.uint8)])
def test_vllm_s_loaders_take_all_tensors(found: dict[str, Any], name: str, suffix: str, dtype: torch.dtype) -> None:
    errors, dtypes = found[name]["errors"], found[name]["dtypes"]
    assert found[name]["missing"] == []
    assert all(error < 0.05 for error in errors.values()), errors
    assert errors["model.layers.1.mlp.down_proj"] < 0.005 < errors["model.layers.0.mlp.down_proj"]
    assert dtypes["model.layers.0.self_attn.qkv_proj.weight"] == "torch.float8_e4m3fn"
    assert dtypes[f"model.layers.0.self_attn.qkv_proj.weight_scale{suffix}"] == str(dtype)
    assert dtypes["model.layers.1.self_attn.qkv_proj.weight"] != "torch.float8_e4m3fn"


def test_inputs_of_float8_layers_are_rounded_on_cpus(found: dict[str, Any]) -> None:
    engine = found["engine"]
    assert engine["layers"] == 4, "of two layers one is float8: query with key and value, output, gate with up, down"
    assert engine["error"] < 1e-4 < engine["error_without"], engine
    assert engine["error_of_cache"] > engine["error"], "the float8 cache changes log-probabilities"
