"""Models with recurrent layers that vLLM cannot run, or computes otherwise, are refused in the driver."""

from pathlib import Path
from typing import Any

import pytest
from recurrent_models import RECURRENT, WITHOUT_CORES
from transformers import AutoConfig

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.models.generation.factory import check_engine_model
from nemo_rl.models.huggingface.recurrent import has_states
from nemo_rl.utils.errors import ConfigError

CPU, GPU = ClusterConfig.build(device="cpu"), ClusterConfig.build(device="cuda")
SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 32}
HEADS = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}


def policy(folder: Path, model_type: str, backend: str = "vllm", **more: Any) -> PolicyConfig:
    generation = {"backend": backend, "vllm_cfg": more.pop("vllm_cfg", {})}
    precision = more.pop("precision", "bfloat16")
    fields = SIZES | (RECURRENT | WITHOUT_CORES).get(model_type, {}) | more
    AutoConfig.for_model(model_type, **fields).save_pretrained(folder)
    return PolicyConfig.build(model_name=str(folder), precision=precision, generation=generation)


def refused(named: str, *arguments: Any, cluster: ClusterConfig = CPU, **more: Any) -> None:
    made = policy(*arguments, **more)
    with pytest.raises(ConfigError, match=named):
        check_engine_model(made, cluster)
    check_engine_model(policy(*arguments, backend="hf", **more), cluster)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("nemotron_h", {"n_groups": 2}),
        ("falcon_h1", {"mamba_n_groups": 2}),
        ("granitemoehybrid", {"mamba_n_groups": 1}),
        ("mamba2", {"n_groups": 1, "num_attention_heads": None}),
        ("zamba2", {}),
        ("qwen3_next", HEADS),
        ("qwen3_5_text", HEADS),
        ("qwen3_5_moe_text", HEADS),
        ("lfm2", {}),
        ("lfm2_moe", {}),
    ],
)
def test_models_that_vllm_runs_on_cpus_are_accepted(tmp_path: Path, model_type: str, fields: dict[str, Any]) -> None:
    check_engine_model(policy(tmp_path, model_type, **fields), CPU)
    without = {"enable_prefix_caching": False}
    check_engine_model(policy(tmp_path, model_type, vllm_cfg=without, **fields), CPU)
    with_it = {"enable_prefix_caching": True}
    refused("cannot share prompts on CPUs", tmp_path, model_type, vllm_cfg=with_it, **fields)
    check_engine_model(policy(tmp_path, model_type, vllm_cfg=with_it, **fields), GPU)


@pytest.mark.parametrize("model_type", ["bamba", "zamba", "recurrent_gemma", "rwkv", "minimax", "zaya"])
@pytest.mark.parametrize("cluster", [CPU, GPU], ids=["cpu", "gpu"])
def test_models_without_a_class_are_refused_everywhere(tmp_path: Path, model_type: str, cluster: ClusterConfig) -> None:
    refused(rf"\({model_type}\): vLLM 0\.32 has no class for it\. .*backend=hf", tmp_path, model_type, cluster=cluster)


@pytest.mark.parametrize(
    ("model_type", "lacking"),
    [
        ("mamba", "selective scan"),
        ("falcon_mamba", "selective scan"),
        ("jamba", "selective scan"),
        ("olmo_hybrid", "Triton kernels"),
        ("kimi_linear", "Triton kernels"),
    ],
)
def test_models_without_kernels_for_cpus_are_accepted_on_gpus(tmp_path: Path, model_type: str, lacking: str) -> None:
    refused(f"{lacking} .*backend=hf, or use GPUs", tmp_path, model_type)
    check_engine_model(policy(tmp_path, model_type), GPU)


@pytest.mark.parametrize("cluster", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    ("model_type", "fields", "named"),
    [
        ("mamba2", {"n_groups": 2}, "2 groups of B and C"),
        ("granitemoehybrid", {"mamba_n_groups": 2}, "2 groups of B and C"),
        ("falcon_h1", {"mamba_rms_norm": True}, "norms after the gate"),
        ("nemotron_h", {"time_step_limit": [0.01, 0.1]}, r"ignores time_step_limit=\[0\.01, 0\.1\]"),
    ],
)
def test_models_that_vllm_computes_otherwise_are_refused(
    tmp_path: Path, model_type: str, fields: dict[str, Any], named: str, cluster: ClusterConfig
) -> None:
    refused(named, tmp_path, model_type, cluster=cluster, **fields)


@pytest.mark.parametrize("model_type", [*RECURRENT, "recurrent_gemma"])
def test_models_with_states_are_known(model_type: str) -> None:
    assert has_states(AutoConfig.for_model(model_type, **SIZES | (RECURRENT | WITHOUT_CORES)[model_type]))


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "deepseek_v3", "gemma3_text", "gpt_oss"])
def test_models_of_attention_have_no_states(model_type: str) -> None:
    assert not has_states(AutoConfig.for_model(model_type))


def test_a_norm_after_the_gate_is_accepted(tmp_path: Path) -> None:
    check_engine_model(policy(tmp_path, "falcon_h1", mamba_rms_norm=True, mamba_norm_before_gate=False), CPU)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_gated_delta_nets_on_cpus_need_bfloat16_and_known_heads(tmp_path: Path, model_type: str) -> None:
    refused(
        r"bfloat16 only, not in float32\. Set .*engine\.precision", tmp_path, model_type, precision="float32", **HEADS
    )
    refused("linear_key_head_dim=32, .* needs 64 or 128", tmp_path, model_type, **dict.fromkeys(HEADS, 32))
    refused("needs 64 or 128 for both", tmp_path, model_type, **HEADS | {"linear_key_head_dim": 128})
    check_engine_model(policy(tmp_path, model_type, precision="float32"), GPU)


def test_qwen3_5_without_torchvision_is_refused_on_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused("needs torchvision", tmp_path, "qwen3_5_text", **HEADS)
