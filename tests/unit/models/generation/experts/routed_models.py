"""Tiny models with many experts, whose routers choose almost at random, and their choices by Hugging Face."""

from collections.abc import Sequence

import torch
from generation_helpers import mixture_config, spread_out
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel


def many_experts(arch: str, seed: int = 0) -> PreTrainedModel:
    """Make a float32 model of four layers, with 4 of 32 experts for each token: "qwen3_moe" or "deepseek_v3"."""
    config = mixture_config(arch)
    config.num_hidden_layers, config.num_experts_per_tok = 4, 4
    if arch == "deepseek_v3":
        config.n_routed_experts, config.num_local_experts = 32, 32
        config.n_group, config.topk_group = 4, 2
    else:
        config.num_experts = 32
    torch.manual_seed(seed)
    model = spread_out(AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.normal_(std=0.05)
    return model


@torch.no_grad()
def experts_of(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Return the experts `[T, L, k]` int8 that Hugging Face's routers choose, in rising order."""
    gates = [module.gate for module in model.modules() if hasattr(module, "gate") and hasattr(module, "experts")]
    chosen: list[Tensor] = []
    hooks = [gate.register_forward_hook(lambda _, __, output: chosen.append(output[2])) for gate in gates]
    model(torch.tensor([list(token_ids)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).sort(-1).values.to(torch.int8)
