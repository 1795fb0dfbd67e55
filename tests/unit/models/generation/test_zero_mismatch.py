"""With `policy.zero_mismatch`, log-probabilities of an engine and of the policy's model have the same bits."""

import json
import os
import subprocess
import sys
from itertools import batched
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from nemo_rl.config import REPOSITORY_ROOT, ClusterConfig, PolicyConfig, load_config
from nemo_rl.config.rules.engines import check_zero_mismatch
from nemo_rl.config.runs.eval import EvalMasterConfig
from nemo_rl.models.generation.vllm.zero_mismatch.check import PROVEN_ROTATIONS, PROVEN_TYPES, require_same_bits
from nemo_rl.utils.errors import ConfigError

CHILD = Path(__file__).with_name("zero_mismatch_child.py")
EVALUATION = REPOSITORY_ROOT / "examples/configs/evals/eval_cpu.yaml"
TOOLS = Path(__file__).parents[4] / "tools"
TYPES = ("llama", "qwen3_moe", "gemma2")
FAST_VLLM_TYPES = ("llama", "qwen3_moe")
"""A type that vLLM computes with its own class, and a mixture that it computes with the modules of transformers."""
ROTATIONS = tuple(f"{name}:{kind}" for name in FAST_VLLM_TYPES for kind in PROVEN_ROTATIONS if kind != "default")
VLLM_TYPES = tuple(batched((*(name for name in PROVEN_TYPES if name not in FAST_VLLM_TYPES), *ROTATIONS), 10))
MORE_TYPES = (
    *("gemma3_text", "cohere2", "qwen2", "qwen3", "mistral", "olmo2", "phi3", "glm4", "smollm3", "gpt_oss"),
    *("deepseek_v3", "glm4_moe"),
)


def found(*arguments: str) -> dict[str, Any]:
    """Return what a process finds that samples with an engine, and scores with the policy's model."""
    path = os.pathsep.join([str(TOOLS), *sys.path])
    done = subprocess.run(
        [sys.executable, str(CHILD), *arguments],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    result: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            result |= json.loads(line)
    return result


def require_equal(result: dict[str, Any], types: tuple[str, ...]) -> None:
    """Check that all tokens were compared in all layouts, and that none has other bits."""
    assert result.keys() == set(types)
    for model_type, of_formats in result.items():
        assert isinstance(of_formats, dict), (model_type, of_formats)
        assert of_formats.keys() == {"float32", "bfloat16"}
        for layouts in of_formats.values():
            assert layouts.keys() == {"alone", "padded", "packed", "shared"}
            assert all(tokens > 100 and others == 0 for tokens, others in layouts.values()), (model_type, layouts)


def test_engine_and_policy_have_the_same_bits() -> None:
    require_equal(found(*TYPES), TYPES)


@pytest.mark.long
def test_more_models_have_the_same_bits() -> None:
    require_equal(found(*MORE_TYPES), MORE_TYPES)


@pytest.mark.vllm
def test_vllm_and_policy_have_the_same_bits() -> None:
    require_equal(found("--engine", "vllm", *FAST_VLLM_TYPES), FAST_VLLM_TYPES)


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("types", VLLM_TYPES, ids=lambda types: types[0])
def test_vllm_has_the_same_bits_for_more_models(types: tuple[str, ...]) -> None:
    require_equal(found("--engine", "vllm", *types), types)


def test_the_comparison_finds_other_bits() -> None:
    layouts = found("--plain", "llama")["llama"]["float32"]
    assert all(others > tokens / 10 for tokens, others in layouts.values())


def policy(**values: Any) -> PolicyConfig:
    generation = {"backend": "hf", **values.pop("generation", {})}
    return PolicyConfig.build(model_name="m", zero_mismatch=True, generation=generation, **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"generation": {"backend": "sglang"}}, "backend=sglang has kernels of its own"),
        ({"generation": {"backend": "megatron"}}, "needs a policy of policy.megatron_cfg"),
        ({"precision": "float32", "generation": {"engine": {"precision": "bfloat16"}}}, "needs one number format"),
        ({"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 4}}}, "round otherwise with adapters"),
    ],
)
def test_settings_with_other_bits_are_refused(values: dict[str, Any], message: str) -> None:
    found = list(check_zero_mismatch(policy(**values), ClusterConfig.build(device="cpu", gpus_per_node=0)))
    assert len(found) == 1 and message in found[0]


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        ({"model_type": "stablelm"}, {}, "a model of type stablelm"),
        ({"model_type": "qwen3_moe", "hidden_act": "gelu"}, {}, "experts with hidden_act=gelu"),
        ({"model_type": "qwen3_moe", "experts_implementation": "eager"}, {}, "no multiples of 8"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, {}, "of type dynamic"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "has quantized weights"),
        ({"model_type": "olmo2"}, {"dtensor_cfg": {"tensor_parallel_size": 2}}, "undivided layers of the policy only"),
        ({}, {"generation": {"top_p": 0.9}}, "vLLM's filters are not proven"),
        ({}, {"generation": {"vllm_cfg": {"kv_cache_dtype": "fp8"}}}, "kv_cache_dtype=fp8 rounds"),
        ({}, {"generation": {"vllm_kwargs": {"quantization": "fp8"}}}, "vllm_kwargs.quantization"),
        ({}, {"generation": {"vllm_kwargs": {"model_impl": "vllm"}}}, "vllm_kwargs.model_impl"),
    ],
)
def test_what_is_not_proven_with_vllm_is_refused(model: dict[str, Any], values: dict[str, Any], message: str) -> None:
    config = AutoConfig.for_model(**{"model_type": "llama", **model})
    asked = policy(**{**values, "generation": {"backend": "vllm", **values.get("generation", {})}})
    with pytest.raises(ConfigError, match=message):
        require_same_bits(asked, config)


@pytest.mark.parametrize("model_type", PROVEN_TYPES)
def test_a_proven_model_is_accepted_with_vllm(model_type: str) -> None:
    require_same_bits(policy(generation={"backend": "vllm"}), AutoConfig.for_model(model_type))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("generation.backend=sglang", "Set it to hf or vllm"),
        ("generation.endpoint={base_url: 'http://host/v1', model: m}", "names another server"),
        ("generation.engine.tensor_parallel_size=2", "engine.tensor_parallel_size=2"),
    ],
)
def test_evaluations_refuse_what_depends_on_other_rows(override: str, message: str) -> None:
    overrides = ("generation.zero_mismatch=true", "cluster.ranks_per_node=2", override)
    with pytest.raises(ConfigError, match=message):
        load_config(EVALUATION, overrides, schema=EvalMasterConfig)


def test_gpus_are_refused() -> None:
    found = list(check_zero_mismatch(policy(), ClusterConfig.build(device="cuda", gpus_per_node=1)))
    assert len(found) == 1 and "on CPUs only" in found[0]


def test_the_name_in_megatron_cfg_has_the_same_meaning() -> None:
    assert not PolicyConfig.build(model_name="m").zero_mismatch
    assert PolicyConfig.build(model_name="m", megatron_cfg={"zero_train_gen_mismatch": True}).zero_mismatch
