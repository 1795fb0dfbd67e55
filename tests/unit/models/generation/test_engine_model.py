"""Models that an engine computes wrongly are refused in the driver, before any worker."""

import importlib.util

import pytest
from transformers import DeepseekV3Config, Qwen2Config, Qwen3MoeConfig

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.models.generation.factory import check_engine_model
from nemo_rl.models.generation.vllm.check import _CPU_HEAD_SIZES
from nemo_rl.utils.errors import ConfigError

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
CPU = ClusterConfig.build(device="cpu")


def policy(folder, model, backend="vllm"):
    model.save_pretrained(folder)
    return PolicyConfig.build(model_name=str(folder), generation={"backend": backend})


def test_head_sizes_that_vllm_lacks_on_cpus_are_refused(tmp_path):
    small = Qwen2Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(ConfigError, match=r"attention heads of 16; vLLM's on CPUs are of 32, .*backend=hf"):
        check_engine_model(policy(tmp_path, small), CPU)
    check_engine_model(policy(tmp_path, small, "hf"), CPU)
    check_engine_model(policy(tmp_path, small), ClusterConfig.build(device="cuda"))


def test_router_replay_needs_an_engine_that_reports_experts_and_a_model_that_has_some(tmp_path):
    mixture, replay = Qwen3MoeConfig(num_hidden_layers=2, head_dim=64), {"enabled": True}
    for backend, folder, model in (("vllm", "a", mixture), ("hf", "a", mixture), ("vllm", "b", Qwen2Config())):
        made = policy(tmp_path / folder, model, backend)
        made = PolicyConfig.build(**made.model_dump(exclude_unset=True) | {"router_replay": replay})
        if (backend, folder) == ("vllm", "a"):
            check_engine_model(made, CPU)
            continue
        message = "Set policy.generation.backend=vllm" if backend == "hf" else "has no experts"
        with pytest.raises(ConfigError, match=message):
            check_engine_model(made, CPU)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"engine": {"pipeline_parallel_size": 2}}, r"engine\.pipeline_parallel_size=2\. Leave it out"),
        ({"vllm_cfg": {"enable_prefix_caching": False}}, r"vllm_cfg\.enable_prefix_caching=false\. Leave it out"),
        ({"vllm_kwargs": {"enable_prefix_caching": False}}, r"enable_prefix_caching=false\. Leave it out"),
        ({"vllm_kwargs": {"decode_context_parallel_size": 2}}, r"vllm_kwargs\.decode_context_parallel_size=2"),
        (
            {"engine": {"pipeline_parallel_size": 2}, "vllm_cfg": {"enable_prefix_caching": False}},
            r"pipeline_parallel_size=2 and .*prefix_caching=false\. Leave them out",
        ),
    ],
)
def test_router_replay_on_gpus_refuses_engines_that_report_no_experts(tmp_path, changes, named):
    """vLLM refuses these while it starts, on GPUs; on CPUs the library reads the experts itself."""
    Qwen3MoeConfig(num_hidden_layers=2, head_dim=64).save_pretrained(tmp_path)
    values = {"model_name": str(tmp_path), "router_replay": {"enabled": True}}
    made = PolicyConfig.build(**values, generation={"backend": "vllm", **changes})
    gpus = ClusterConfig.build(device="cuda")
    with pytest.raises(ConfigError, match=named):
        check_engine_model(made, gpus)
    check_engine_model(made, CPU)
    check_engine_model(PolicyConfig.build(**values, generation={"backend": "vllm"}), gpus)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm")
def test_the_known_head_sizes_are_those_of_vllm():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(_CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()


LATENT = [DeepseekV3Config(kv_lora_rank=16, rope_parameters=rope) for rope in (YARN, None)]


@pytest.mark.parametrize("model", [*LATENT, Qwen2Config()])
def test_models_that_vllm_serves_are_accepted(tmp_path, model):
    check_engine_model(policy(tmp_path, model), CPU)


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        ({}, 64),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, 128),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": 32}}, 64),
    ],
)
def test_a_context_beyond_the_models_is_refused(tmp_path, monkeypatch, rope, most):
    asked = policy(tmp_path, Qwen2Config(max_position_embeddings=64, **rope))
    asked.generation.engine.max_model_len = most
    check_engine_model(asked, CPU)
    asked.generation.engine.max_model_len = most + 1
    with pytest.raises(ConfigError, match=rf"max_model_len={most + 1}, but the model reads {most} tokens"):
        check_engine_model(asked, CPU)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    check_engine_model(asked, CPU)
