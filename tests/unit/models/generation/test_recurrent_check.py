"""Models with recurrent layers that vLLM cannot run, or computes otherwise, are refused in the driver."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from recurrent_models import RECURRENT, WITHOUT_CORES
from transformers import AutoConfig, PretrainedConfig

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.models.generation.factory import check_engine_model
from nemo_rl.models.generation.vllm.check import check_recurrent
from nemo_rl.models.huggingface.recurrent import has_states
from nemo_rl.utils.errors import ConfigError

CPU, GPU = ClusterConfig.build(device="cpu"), ClusterConfig.build(device="cuda")
SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 32}
HEADS = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}


def model(model_type: str, **fields: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **SIZES | (RECURRENT | WITHOUT_CORES).get(model_type, {}) | fields)


@cache
def policy(precision: str = "bfloat16", enable_prefix_caching: bool | None = None) -> PolicyConfig:
    generation = {"backend": "vllm", "vllm_cfg": {"enable_prefix_caching": enable_prefix_caching}}
    return PolicyConfig.build(model_name="model", precision=precision, generation=generation)


def refused(named: str, config: PretrainedConfig, cluster: ClusterConfig = CPU, **settings: Any) -> None:
    with pytest.raises(ConfigError, match=named):
        check_recurrent(policy(**settings), cluster, config)


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
def test_models_that_vllm_runs_on_cpus_are_accepted(model_type: str, fields: dict[str, Any]) -> None:
    config = model(model_type, **fields)
    for prefix_caching in (None, False):
        check_recurrent(policy(enable_prefix_caching=prefix_caching), CPU, config)
    refused("cannot share prompts on CPUs", config, enable_prefix_caching=True)
    check_recurrent(policy(enable_prefix_caching=True), GPU, config)


@pytest.mark.parametrize("model_type", ["bamba", "zamba", "recurrent_gemma", "rwkv", "minimax", "zaya"])
@pytest.mark.parametrize("cluster", [CPU, GPU], ids=["cpu", "gpu"])
def test_models_without_a_class_are_refused_everywhere(model_type: str, cluster: ClusterConfig) -> None:
    refused(rf"\({model_type}\): vLLM 0\.32 has no class for it\. .*backend=hf", model(model_type), cluster)


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
def test_models_without_kernels_for_cpus_are_accepted_on_gpus(model_type: str, lacking: str) -> None:
    refused(f"{lacking} .*backend=hf, or use GPUs", model(model_type))
    check_recurrent(policy(), GPU, model(model_type))


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
    model_type: str, fields: dict[str, Any], named: str, cluster: ClusterConfig
) -> None:
    refused(named, model(model_type, **fields), cluster)


@pytest.mark.parametrize("model_type", [*RECURRENT, "recurrent_gemma"])
def test_models_with_states_are_known(model_type: str) -> None:
    assert has_states(AutoConfig.for_model(model_type, **SIZES | (RECURRENT | WITHOUT_CORES)[model_type]))


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "deepseek_v3", "gemma3_text", "gpt_oss"])
def test_models_of_attention_have_no_states(model_type: str) -> None:
    assert not has_states(AutoConfig.for_model(model_type))


def test_a_norm_after_the_gate_is_accepted() -> None:
    check_recurrent(policy(), CPU, model("falcon_h1", mamba_rms_norm=True, mamba_norm_before_gate=False))


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_gated_delta_nets_on_cpus_need_bfloat16_and_known_heads(model_type: str) -> None:
    named = r"bfloat16 only, not in float32\. Set .*engine\.precision"
    refused(named, model(model_type, **HEADS), precision="float32")
    refused("linear_key_head_dim=32, .* needs 64 or 128", model(model_type, **dict.fromkeys(HEADS, 32)))
    refused("needs 64 or 128 for both", model(model_type, **HEADS | {"linear_key_head_dim": 128}))
    check_recurrent(policy(precision="float32"), GPU, model(model_type))


def test_the_check_before_a_run_is_one_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3.5 also needs torchvision for text alone."""
    for model_type, named in (("rwkv", "has no class"), ("qwen3_5_text", "needs torchvision")):
        model(model_type, **HEADS).save_pretrained(tmp_path / model_type)
        made = PolicyConfig.build(model_name=str(tmp_path / model_type), generation={"backend": "vllm"})
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=named):
            check_engine_model(made, CPU)
        monkeypatch.undo()
        values = made.model_dump(exclude_unset=True) | {"generation": {"backend": "hf"}}
        check_engine_model(PolicyConfig.build(**values), CPU)
