"""Arguments that vLLM gets from the model's configuration; vLLM is imported in a separate process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from generation_helpers import make_model, save_model
from transformers import Gemma3Config, Qwen3_5Config

from nemo_rl.models.generation.vllm.settings import engine_environment

OVERRIDES = """
import json, sys
from dataclasses import replace
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.vllm.arguments import _hf_overrides, engine_arguments

model, cases = sys.argv[1], json.loads(sys.argv[2])
found = {}
for name, values in cases.items():
    settings = EngineSettings(**{"backend": "vllm", "model_name": model, "tokenizer_name": model, "max_model_len": 64,
                                 "device": "cuda", "precision": "bfloat16"} | values)
    found[name] = _hf_overrides(settings)
cpu = EngineSettings("vllm", model, model, "cpu", "bfloat16", 64, engine_kwargs={"hf_overrides": {"a": 1}})
found["arguments"] = engine_arguments(cpu).hf_overrides
gpu = EngineSettings("vllm", model, model, "cuda", "bfloat16", 64, enforce_eager=False)
of_graphs = (
    gpu, replace(gpu, samples=512), replace(gpu, samples=600), replace(gpu, samples=5000),
    replace(gpu, samples=600, enforce_eager=True), replace(cpu, samples=600, engine_kwargs={}),
    replace(gpu, samples=600, engine_kwargs={"max_cudagraph_capture_size": 8}),
)
found["graphs"] = [engine_arguments(each).max_cudagraph_capture_size for each in of_graphs]
found["towers"] = [
    engine_arguments(replace(gpu, model_name=folder, engine_kwargs=own)).language_model_only
    for folder in (model, *sys.argv[3:]) for own in ({}, {"language_model_only": False})
]
print(json.dumps(found))
"""
CASES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float16": {"precision": "float16"},
    "float32": {"precision": "float32"},
    "on a CPU": {"device": "cpu"},
    "quantized": {"engine_kwargs": {"quantization": "fp8"}},
    "of the policy": {"hf_overrides": {"rms_norm_eps": 0.5}},
    "of vllm_kwargs": {
        "hf_overrides": {"rms_norm_eps": 0.5, "vocab_size": 7},
        "engine_kwargs": {"hf_overrides": {"vocab_size": 9}},
    },
    "head of vllm_kwargs": {"engine_kwargs": {"hf_overrides": {"head_dtype": "model"}}},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, make_model("llama", tie_embeddings=False, seed=1))
    multimodal = []
    for kind in (Gemma3Config, Qwen3_5Config):
        multimodal.append(str(tmp_path_factory.mktemp("multimodal")))
        kind().save_pretrained(multimodal[-1])
    paths = os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", OVERRIDES, str(folder), json.dumps(CASES), *multimodal],
        env=os.environ | engine_environment("cpu") | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.vllm
def test_logits_are_float32_on_gpus_as_in_training(found: dict[str, Any]) -> None:
    assert found["bfloat16"] == found["float16"] == {"head_dtype": "float32"}
    assert found["float32"] == found["on a CPU"] == found["quantized"] == {}


@pytest.mark.vllm
def test_user_overrides_win_and_keep_the_other_arguments(found: dict[str, Any]) -> None:
    assert found["of the policy"] == {"head_dtype": "float32", "rms_norm_eps": 0.5}
    assert found["of vllm_kwargs"] == {"head_dtype": "float32", "rms_norm_eps": 0.5, "vocab_size": 9}
    assert found["head of vllm_kwargs"] == {"head_dtype": "model"}
    assert found["arguments"] == {"a": 1}


@pytest.mark.vllm
def test_graphs_cover_the_samples_of_an_engine(found: dict[str, Any]) -> None:
    assert found["graphs"] == [None, None, 600, 1024, None, None, 8]


@pytest.mark.vllm
def test_checkpoints_that_also_read_images_get_engines_for_text(found: dict[str, Any]) -> None:
    """The trainer sends no tower of Qwen3.5, which every size declares; a user's own choice wins."""
    llama, gemma3, qwen3_5 = (found["towers"][each : each + 2] for each in (0, 2, 4))
    assert llama == [False, False]
    assert gemma3 == qwen3_5 == [True, False]
