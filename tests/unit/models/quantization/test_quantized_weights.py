"""Which weights engines get in float8, and what vLLM and the kernels are told about them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.models.generation.factory import check_engine_model, engine_precision, engine_settings
from nemo_rl.models.generation.vllm.arguments import quantization_config, unquantized_layers, warn_of_weights_only
from nemo_rl.models.huggingface.checkpoint_names import in_checkpoint
from nemo_rl.models.quantization import FP8_WEIGHTS, MXFP8, WeightQuantization, weight_quantization
from nemo_rl.utils.errors import ConfigError

DENSE = Qwen2Config(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=2048,
)
EXPERTS = Qwen3MoeConfig(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=32,
    max_position_embeddings=2048,
)


def sent_names(config: Any, quantization: WeightQuantization) -> list[str]:
    """Return the names of the weights in float8, as a policy sends them."""
    model = AutoModelForCausalLM.from_config(config)
    weights = in_checkpoint(model, model.state_dict().items())
    return [name for name, tensor in weights if quantization.takes(name, tuple(tensor.shape))]


def test_matrices_of_layers_are_quantized_and_nothing_else() -> None:
    names = sent_names(DENSE, WeightQuantization(FP8_WEIGHTS, 4, first_layers=1, last_layers=1, ignored=("down",)))
    of_layer = [f"self_attn.{name}_proj" for name in "qkvo"] + ["mlp.gate_proj", "mlp.up_proj"]
    assert sorted(names) == sorted(f"model.layers.{layer}.{name}.weight" for layer in (1, 2) for name in of_layer)
    of_experts = sent_names(EXPERTS, WeightQuantization(FP8_WEIGHTS, 2))
    assert "model.layers.1.mlp.experts.0.gate_proj.weight" in of_experts
    assert not [name for name in of_experts if name.endswith(("mlp.gate.weight", "norm.weight", "lm_head.weight"))]


@pytest.mark.parametrize("name", ["layers.3.w2.weight", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"])
def test_names_of_other_families(name: str) -> None:
    quantization = WeightQuantization(FP8_WEIGHTS, 4)
    assert quantization.takes(name, (8, 8)) and not quantization.takes(name, (2, 8, 8))
    assert not quantization.takes(name.replace("weight", "bias"), (8, 8))


def test_float8_tensors_have_the_names_shapes_and_dtypes_of_checkpoints() -> None:
    name, matrix = "model.layers.0.mlp.up_proj.weight", torch.randn(300, 130)
    for block_format, suffix, dtype, grid in (
        (FP8_WEIGHTS, "_scale_inv", "float32", (3, 2)),
        (MXFP8, "_scale", "uint8", (300, 5)),
    ):
        quantization = WeightQuantization(block_format, 1)
        described = quantization.described(name, "bfloat16", (300, 130))
        assert described == [(name, "float8_e4m3fn", (300, 130)), (name + suffix, dtype, grid)]
        tensors = quantization.encode(name, matrix)
        assert [(str(each.dtype), tuple(each.shape)) for each in tensors] == [
            (f"torch.{dtype}", shape) for _, dtype, shape in described
        ]
    assert WeightQuantization(FP8_WEIGHTS, 1, simulated=True).described(name, "x", (2, 2)) == [(name, "x", (2, 2))]
    norm = torch.ones(4)
    (kept,) = WeightQuantization(FP8_WEIGHTS, 1).encode("model.norm.weight", norm)
    assert kept is norm


def test_vllm_is_told_which_layers_stay_as_they_are() -> None:
    quantization = WeightQuantization(FP8_WEIGHTS, 4, first_layers=1, ignored=("down",))
    names = unquantized_layers(DENSE, quantization)
    assert "lm_head" in names and "model.layers.0.self_attn.q_proj" in names and "model.layers.3.mlp.down_proj" in names
    assert "model.layers.1.self_attn.q_proj" not in names
    described = quantization_config(quantization, names)
    assert described == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "ignored_layers": sorted(names),
    }
    mx = quantization_config(WeightQuantization(MXFP8, 4), ["lm_head"])
    assert mx == {"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}
    assert "model.layers.0.mlp.experts" in unquantized_layers(EXPERTS, WeightQuantization(FP8_WEIGHTS, 2, 1))
    assert "model.layers.1.mlp.experts" not in unquantized_layers(EXPERTS, WeightQuantization(FP8_WEIGHTS, 2, 1))


def policy_with(folder: Path, config: Any = DENSE, engine: dict[str, Any] | None = None, **keys: Any) -> PolicyConfig:
    config.save_pretrained(folder)
    assert AutoConfig.from_pretrained(folder).num_hidden_layers
    sections = {"engine": {"precision": "fp8", **(engine or {})}, "vllm_cfg": keys}
    return PolicyConfig.build(model_name=str(folder), precision="bfloat16", generation=sections)


GPUS = ClusterConfig.build(device="cuda", gpus_per_node=8)
CPU = ClusterConfig.build(device="cpu", gpus_per_node=0)


def test_the_keys_choose_format_kernels_and_layers(tmp_path: Path) -> None:
    keys = {"pow2_weight_scaling_factors": True, "pow2_activation_scaling_factors": True, "use_deep_gemm": True}
    policy = policy_with(tmp_path, num_first_layers_in_bf16=1, quantization_ignored_layer_kws=["o_proj"], **keys)
    settings = engine_settings(policy, GPUS, 1, load_weights=False)
    quantization = settings.quantization
    assert quantization is not None and not quantization.simulated
    assert (quantization.first_layers, quantization.num_layers, quantization.ignored) == (1, 4, ("o_proj",))
    assert quantization.block_format.scales == quantization.activation_format.scales == "power_of_two"
    assert settings.precision == engine_precision(policy) == "bfloat16"
    assert settings.env_vars == {
        "VLLM_USE_DEEP_GEMM": "1",
        "VLLM_MOE_USE_DEEP_GEMM": "1",
        "VLLM_USE_DEEP_GEMM_E8M0": "1",
    }
    plain = policy_with(tmp_path, engine={"env_vars": {"VLLM_MOE_USE_DEEP_GEMM": "1"}, "kv_cache_dtype": "fp8"})
    settings = engine_settings(plain, GPUS, 1, load_weights=False)
    assert settings.env_vars["VLLM_USE_DEEP_GEMM"] == "0" and settings.env_vars["VLLM_MOE_USE_DEEP_GEMM"] == "1"
    assert settings.engine_kwargs["kv_cache_dtype"] == "fp8"
    on_cpu = engine_settings(policy_with(tmp_path, is_mx=True), CPU, 1, load_weights=False)
    assert on_cpu.quantization == WeightQuantization(MXFP8, 4, activation_format=MXFP8, simulated=True)
    assert on_cpu.env_vars == {}
    plain.generation.engine.precision = "auto"  # type: ignore[union-attr]
    assert weight_quantization(plain, GPUS) is None


@pytest.mark.parametrize(
    ("engine", "keys", "changes", "message"),
    [
        ({}, {"num_first_layers_in_bf16": 3, "num_last_layers_in_bf16": 1}, {}, r"= 4 leave none of the model's 4"),
        ({}, {}, {"intermediate_size": 200}, r"intermediate_size 200 / 1 = 200, no multiple of 128.*is_mx=true"),
        ({}, {}, {"num_key_value_heads": 2}, r"key-value heads 64 / 1 = 64, no multiple of 128"),
        ({"tensor_parallel_size": 4}, {}, {}, r"query heads 128 / 4 = 32, no multiple of 128"),
        (
            {},
            {"is_mx": True},
            {"intermediate_size": 200},
            r"columns of intermediate_size 200 / 1 = 200, no multiple of 32",
        ),
    ],
)
def test_models_that_blocks_do_not_fit_are_refused(
    tmp_path: Path, engine: dict[str, Any], keys: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    config = Qwen2Config(**{**DENSE.to_dict(), "layer_types": None, **changes})
    policy = policy_with(tmp_path, config, engine, **keys)
    with pytest.raises(ConfigError, match=rf"(?s)policy\.generation\.vllm_cfg.*{message}"):
        check_engine_model(policy, GPUS)


def test_models_that_blocks_fit_are_accepted(tmp_path: Path) -> None:
    check_engine_model(policy_with(tmp_path), GPUS)
    check_engine_model(policy_with(tmp_path, engine={"tensor_parallel_size": 2}, is_mx=True), GPUS)
    uneven = Qwen2Config(**{**DENSE.to_dict(), "layer_types": None, "intermediate_size": 200})
    check_engine_model(policy_with(tmp_path, uneven), CPU)


def test_a_float8_cache_that_cpus_do_not_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = Qwen2Config(**{**DENSE.to_dict(), "layer_types": None, "hidden_size": 320})
    cache = {"kv_cache_dtype": "fp8"}
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=fp8: on CPUs vLLM needs heads of a multiple of 32.*have 80"):
        check_engine_model(policy_with(tmp_path, wide, cache), CPU)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    with pytest.raises(ConfigError, match=r"needs AVX-512, and this processor has AVX2\. Set it to auto"):
        check_engine_model(policy_with(tmp_path, DENSE, cache), CPU)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    check_engine_model(policy_with(tmp_path, DENSE, cache), CPU)


@pytest.mark.parametrize(
    ("weights", "capability", "warns"),
    [(MXFP8, (9, 0), True), (MXFP8, (10, 0), False), (FP8_WEIGHTS, (9, 0), False)],
)
def test_mxfp8_without_kernels_for_it_is_told(weights, capability, warns, caplog) -> None:
    with caplog.at_level("WARNING"):
        warn_of_weights_only(WeightQuantization(weights, 2), capability)
    assert ("capability 9.0 multiply no MXFP8 matrices" in caplog.text) == warns
