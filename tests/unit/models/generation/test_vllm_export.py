"""vLLM gives an exported checkpoint the log-probabilities of training."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_process import EngineProcess
from generation_helpers import MAX_MODEL_LEN, PROMPTS, ask, make_settings, reference_logprobs
from tiny_models import make_char_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nemo_rl.models.dtensor.checkpoints.model_files import prepare_weights
from nemo_rl.models.dtensor.training_backend import DTensorTraining
from nemo_rl.models.huggingface.rotary import fix_rotary_frequencies

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]

COMMON = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
COMMON |= {"vocab_size": 264, "pad_token_id": 256, "eos_token_id": 258, "initializer_range": 0.15}
EXPERTS = {"num_experts_per_tok": 2, "num_key_value_heads": 1, "head_dim": 32}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 16, "long_factor": [3.0] * 16}
# Experts first: the process's first vLLM engine decides whether expert groups exist.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "mixtral": EXPERTS | {"num_local_experts": 4},
    "qwen2": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "gpt_neox": {"max_position_embeddings": 512, "tie_word_embeddings": False},
    "phi3": {"num_key_value_heads": 1, "original_max_position_embeddings": 16, "max_position_embeddings": 512}
    | {"rope_parameters": LONG_ROPE | {"original_max_position_embeddings": 16}, "bos_token_id": None},
}


def _exported(model_type: str, folder: Path) -> PreTrainedModel:
    """Write a random model in float32 as a checkpoint and export it to `folder/hf`."""
    torch.manual_seed(21)
    config = AutoConfig.for_model(model_type, **COMMON | ARCHITECTURES[model_type])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    prepare_weights(model, folder / "weights")(None)
    make_char_tokenizer().save_pretrained(folder / "weights/model")
    DTensorTraining().export(folder / "weights", folder / "hf")
    fix_rotary_frequencies(model, MAX_MODEL_LEN)
    return model


def test_vllm_reproduces_the_log_probs_of_exported_checkpoints(tmp_path: Path) -> None:
    """Includes weights that have other names in memory: fused experts, output heads."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        models = {name: _exported(name, tmp_path / name) for name in ARCHITECTURES}
    finally:
        dist.destroy_process_group()
    settings = {name: make_settings(tmp_path / name / "hf", "vllm", load_weights=True) for name in models}
    requests = [ask(prompt, temperature=0.0) for prompt in PROMPTS]
    with EngineProcess(settings) as engine:
        for name, model in models.items():
            results = engine.generate(name, requests)
            for request, result in zip(requests, results, strict=True):
                want = reference_logprobs(model, request.prompt_token_ids, result.token_ids.tolist(), request.sampling)
                torch.testing.assert_close(torch.tensor(result.logprobs), torch.tensor(want).float(), rtol=0, atol=2e-4)
            assert len({tuple(result.token_ids.tolist()) for result in results}) == len(PROMPTS), "the prompts matter"
