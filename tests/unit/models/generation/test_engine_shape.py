"""Sizes of an engine that divide a model, checked in the driver before any worker starts."""

import pytest
from transformers import DeepseekV3Config, MixtralConfig, Qwen2Config, Qwen3MoeConfig

from nemo_rl.config import ClusterConfig, GenerationConfig, PolicyConfig
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.generation.factory import check_engine_model, engine_settings, make_engines
from nemo_rl.models.generation.megatron.check import engine_size_problems
from nemo_rl.models.generation.vllm.check import check_engine_shape
from nemo_rl.utils.errors import ConfigError

DENSE = Qwen2Config(num_attention_heads=12, num_key_value_heads=2, intermediate_size=8960, num_hidden_layers=28)
EXPERTS = Qwen3MoeConfig(
    num_attention_heads=32,
    num_key_value_heads=4,
    num_experts=6,
    moe_intermediate_size=36,
    intermediate_size=6144,
    num_hidden_layers=4,
)
MIXTRAL = MixtralConfig(num_attention_heads=32, num_key_value_heads=8, num_local_experts=8, intermediate_size=36)
LATENT = DeepseekV3Config(kv_lora_rank=16, num_attention_heads=12, num_key_value_heads=5, intermediate_size=96)


def shape(tensor: int = 1, stages: int = 1, experts: int = 1) -> GenerationConfig:
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "expert_parallel_size": experts}
    generation = PolicyConfig.build(model_name="m", generation={"engine": sizes}).generation
    assert generation is not None
    return generation


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        (
            DENSE,
            shape(8),
            r"tensor_parallel_size=8 does not divide the model: num_attention_heads 12 / 8 = 1\.5\. "
            r"Sizes that do: 1, 2, 4\.",
        ),
        (DENSE, shape(6), r"intermediate_size 8960 / 6 = 1493\.33\. Sizes that do: 1, 2, 4\."),
        (DENSE, shape(3), r"num_key_value_heads 2 and 3 do not divide each other"),
        (DENSE, shape(2, stages=29), r"pipeline_parallel_size=29 is more than the model's 28 layers\. Use at most 28"),
        (DENSE, shape(2, experts=2), r"expert_parallel_size=2, but the model has no experts\. Set it to 1"),
        (EXPERTS, shape(8), r"moe_intermediate_size 36 / 8 = 4\.5\. Sizes that do: 1, 2, 4\."),
        (EXPERTS, shape(8, experts=8), r"expert_parallel_size=8 is more than the model's 6 experts"),
        (MIXTRAL, shape(8), r"intermediate_size 36 / 8 = 4\.5\."),
    ],
)
def test_sizes_that_do_not_divide_the_model_are_refused(model, sizes: GenerationConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"policy\.generation\.engine\..*{message}"):
        check_engine_shape(model, sizes)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (DENSE, shape(4, stages=28)),
        (DENSE, shape(4)),  # more ranks than key-value heads: vLLM copies them
        (EXPERTS, shape(4, experts=4)),
        (MIXTRAL, shape(8, experts=8)),  # whole experts are not divided
        (LATENT, shape(4)),  # latent attention has no key-value heads to divide
    ],
)
def test_sizes_that_divide_the_model_are_accepted(model, sizes: GenerationConfig) -> None:
    check_engine_shape(model, sizes)


def test_engine_sizes_are_checked_before_ray_starts(tmp_path) -> None:
    DENSE.save_pretrained(tmp_path)
    policy = PolicyConfig.build(model_name=str(tmp_path), generation={"engine": {"tensor_parallel_size": 8}})
    for device in ("cpu", "cuda"):
        with pytest.raises(ConfigError, match="12 / 8"):
            check_engine_model(policy, ClusterConfig.build(device=device))


def test_engines_of_several_processes_need_whole_engines_on_each_machine(tmp_path) -> None:
    """Three slots on each of two machines would make three engines, one of them on both; one on each, one engine."""
    DENSE.save_pretrained(tmp_path)
    engine = {"tensor_parallel_size": 2}
    policy = PolicyConfig.build(model_name=str(tmp_path), generation={"engine": engine})
    machines = ClusterConfig.build(device="cpu")
    settings = engine_settings(policy, machines, seed=0, load_weights=False)
    assert (settings.num_workers, settings.tensor_parallel_size) == (2, 2)
    with pytest.raises(ConfigError, match=r"2 ranks of an engine .* \[3, 3\] bundles do not divide the 3 "):
        make_engines(settings, RayVirtualCluster([3, 3], use_gpus=False), machines)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        # Two layers, keys and values of 2 heads of 16 numbers of 4 bytes; 256 sequences of two blocks of 128 tokens.
        ({"max_model_len": 200}, 2 * 2 * 2 * 16 * 4 * 256 * 256),
        ({"max_model_len": 200, "tensor_parallel_size": 2}, 2 * 2 * 1 * 16 * 4 * 256 * 256),
        ({"max_model_len": 20_000}, 256 << 20),
        ({"max_model_len": 200, "kv_cache_memory_mb": 3}, 3 << 20),
    ],
)
def test_the_cpu_cache_is_as_large_as_the_concurrent_requests(tmp_path, engine, expected) -> None:
    Qwen2Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2).save_pretrained(
        tmp_path
    )
    policy = PolicyConfig.build(model_name=str(tmp_path), precision="float32", generation={"engine": engine})
    settings = engine_settings(policy, ClusterConfig.build(device="cpu"), seed=0, load_weights=False)
    assert settings.kv_cache_bytes == expected


MEGATRON = Qwen3MoeConfig(
    num_attention_heads=8,
    num_key_value_heads=4,
    num_experts=6,
    moe_intermediate_size=36,
    num_hidden_layers=4,
    vocab_size=1024,
    mlp_only_layers=[],
)


@pytest.mark.parametrize(
    ("model", "sizes", "problems"),
    [
        (MEGATRON, {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}, []),
        (MEGATRON, {"tensor_parallel_size": 2, "expert_parallel_size": 2}, []),
        (
            MEGATRON,
            {"tensor_parallel_size": 8},
            [
                "tensor_parallel_size=8 does not divide 4 heads of keys and values (num_key_value_heads) / 8 = 0.5, "
                "36 columns of an expert (moe_intermediate_size) / 8 = 4.5. Sizes that do: 1, 2, 4."
            ],
        ),
        (
            MEGATRON,
            {"tensor_parallel_size": 4, "expert_parallel_size": 4},
            [
                "expert_parallel_size=4 does not divide 6 experts of a layer (num_local_experts) / 4 = 1.5. "
                "Sizes that do: 1, 2, 3, 6."
            ],
        ),
        (
            MEGATRON,
            {"pipeline_parallel_size": 3},
            [
                "pipeline_parallel_size=3 does not divide 4 layers (num_hidden_layers) / 3 = 1.33333. "
                "Sizes that do: 1, 2, 4."
            ],
        ),
        (
            DENSE,
            {"tensor_parallel_size": 2, "expert_parallel_size": 2},
            ["expert_parallel_size=2, but the model has no experts. Set it to 1."],
        ),
    ],
)
def test_sizes_of_a_megatron_engine_divide_the_model(model, sizes: dict[str, int], problems: list[str]) -> None:
    policy = PolicyConfig.build(model_name="m", generation={"backend": "megatron", "engine": sizes})
    assert list(engine_size_problems(policy, model)) == problems
