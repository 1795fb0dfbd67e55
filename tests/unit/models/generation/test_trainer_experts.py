"""Experts that vLLM computes with `policy.zero_mismatch` have the bits of the experts of transformers."""

import importlib.util

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]


@pytest.mark.parametrize("shares_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_have_the_bits_of_transformers(dtype: torch.dtype, shares_dtype: torch.dtype) -> None:
    """Also if no token chooses some experts, and for routers whose factors have another number format."""
    from nemo_rl.models.generation.vllm.zero_mismatch.trainer_modules import experts_of_tokens

    sizes = {"hidden_size": 64, "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
    config = AutoConfig.for_model("qwen3_moe", **sizes)
    config._experts_implementation = "grouped_mm"
    generator = torch.Generator().manual_seed(0)
    experts = Qwen3MoeExperts(config).to(dtype)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype) / 8
    for tokens in (1, 2, 50):
        x = torch.randn(tokens, 64, generator=generator).to(dtype)
        scores = torch.rand(tokens, 6, generator=generator)  # the last two experts get no tokens
        shares, chosen = scores.topk(3)
        with torch.no_grad():
            ours = experts_of_tokens(x, experts.gate_up_proj, experts.down_proj, chosen, shares.to(shares_dtype))
            theirs = experts(x, chosen, shares.to(shares_dtype))
        assert ours.dtype == dtype
        assert torch.equal(ours, theirs)
