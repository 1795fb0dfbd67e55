"""Engines and trainer in bfloat16 after a sync: weights that stay float32, and what engines derive from weights.

Biases of routers have a size of 6, where bfloat16 has steps of 0.03: rounded ones choose other experts. Weights come
from the trainer's own stream.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_process import EngineProcess
from generation_helpers import PROMPTS, ask, make_settings, mixture_config, reference_logprobs, save_model, spread_out
from policy_helpers import policy_config, process_group
from rounded_models import in_bfloat16
from routed_models import experts_of
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from vllm_looks import router_biases

from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.lanes import Lane
from nemo_rl.weight_sync.transport import TransportSpec

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]

SPEC = TransportSpec("shared_memory", run_id="test", bucket_size_bytes=100_000)
COMMON: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 256,
    "bos_token_id": None,
    "eos_token_id": 258,
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
RECURRENT: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
        "layers_block_type": ["mamba", "attention"],
    },
    "falcon_h1": {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
        "mamba_d_ssm": 128,
    },
}
LONG = [(7 * i) % 250 for i in range(150)]


def mixture(arch: str, seed: int) -> PreTrainedModel:
    config = mixture_config(arch) if arch == "deepseek_v3" else AutoConfig.for_model(arch, **COMMON)
    config.update(ROUTED | {"num_local_experts": 32})
    torch.manual_seed(seed)
    model = spread_out(AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(6 + 0.05 * torch.randn(bias.shape))
    return model


def recurrent(arch: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(arch, **COMMON | RECURRENT[arch])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "conv1d.weight" in name:
                parameter.copy_(0.5 * noise)
            elif parameter.dim() > 1:
                parameter.copy_(0.15 * noise)
            else:
                parameter.add_(0.1 * noise)
    return model.eval()


def trained_here(
    engines: EngineProcess, sender: WeightSender, folder: Path, model: PreTrainedModel, version: int
) -> None:
    """Send a model as a trainer in bfloat16 does."""
    model.save_pretrained(folder)
    config = policy_config(str(folder), precision="bfloat16", sequence_packing={"enabled": False})
    with process_group():
        backend = DTensorBackend(config, torch.device("cpu"), init_optimizer=False, init_reference_model=False)
        assert engines.sync("model", sender, SPEC, backend.held_weights(torch.bfloat16), version) == []


@pytest.fixture
def sending(request: pytest.FixtureRequest) -> WeightSender:
    sender = WeightSender([Lane(SPEC)], rank=0, is_node_leader=True)
    request.addfinalizer(sender.close)
    return sender


@pytest.mark.parametrize("arch", ["deepseek_v3", "glm4_moe"])
def test_engine_and_trainer_choose_the_same_experts_after_a_sync(
    arch: str, sending: WeightSender, tmp_path: Path
) -> None:
    save_model(tmp_path, mixture(arch, seed=1))
    how: dict[str, Any] = {"precision": "bfloat16", "reports_experts": True, "load_weights": False}
    with EngineProcess({"model": make_settings(tmp_path, "vllm", **how)}) as engines:
        for version in (1, 2):
            model = mixture(arch, seed=1 + version)
            biases = [each for name, each in model.named_buffers() if name.endswith("e_score_correction_bias")]
            trained_here(engines, sending, tmp_path / f"trained_{version}", model, version)
            held = engines.look("model", router_biases)
            assert len(held) == len(biases) > 0
            assert all(torch.equal(torch.tensor(mine), bias) for mine, bias in zip(held, biases, strict=True))
            (result,) = engines.generate("model", [ask(LONG, version)])
            ids = [*LONG, *result.token_ids.tolist()]
            chosen = torch.tensor(result.routed_experts)[:-1].sort(-1).values
            model = in_bfloat16(model)
            right = (chosen != experts_of(model, ids)[:-1]).any(-1).float().mean()
            for bias in biases:
                bias.copy_(bias.to(torch.bfloat16))
            rounded = (chosen != experts_of(model, ids)[:-1]).any(-1).float().mean()
            assert right < 0.08 and rounded > 2 * right and rounded > 0.1, (right, rounded)


@pytest.mark.parametrize("arch", RECURRENT)
def test_recurrent_layers_use_the_new_weights_after_each_sync(arch: str, sending: WeightSender, tmp_path: Path) -> None:
    """vLLM packs the convolution on processors with AVX-512 for bfloat16 and keeps a copy of the old one."""
    save_model(tmp_path, recurrent(arch, seed=1))
    without_cache = {"engine_kwargs": {"enable_prefix_caching": False}}  # no prefixes of states on a CPU
    with EngineProcess({"model": make_settings(tmp_path, "vllm", precision="bfloat16", **without_cache)}) as engines:
        for version in (1, 2):
            model = recurrent(arch, seed=1 + version)
            trained_here(engines, sending, tmp_path / f"trained_{version}", model, version)
            model, differences = in_bfloat16(model), []
            for prompt in PROMPTS:
                (result,) = engines.generate("model", [ask(prompt, version)])
                response = result.token_ids.tolist()
                want = reference_logprobs(model, prompt, response, SamplingParams())
                differences += [abs(mine - right) for mine, right in zip(result.logprobs, want, strict=True)]
            assert sum(differences) / len(differences) < 0.03 and max(differences) < 0.15, differences
