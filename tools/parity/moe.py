"""Make a mixture of experts that answers like a dense model: every expert is almost a copy of the layer's MLP.

If the weights of the chosen experts add up to 1, the mixture's output is about that of one copy, so a run starts from
the dense model's answers; router and experts then diverge (Komatsuzaki et al. 2022, arXiv:2212.05055). Invariant: the
experts of a layer differ. With equal experts the router's gradient would be rounding errors only, which Adam scales up
to normal size, so runs on different meshes would not agree.

Qwen3-MoE normalises queries and keys and has no biases: it starts with the dense model's style and few right answers.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

_COPIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "hidden_act",
)

_CONFIGS: dict[str, Callable[..., PretrainedConfig]] = {
    "qwen2_moe": partial(Qwen2MoeConfig, shared_expert_intermediate_size=32),
    "qwen3_moe": Qwen3MoeConfig,
}
_APART = 0.05
"""Distance of experts from the copied MLP, in standard deviations of its weights."""


@torch.no_grad()
def save_mixture(dense: Path, folder: Path, num_experts: int = 4, family: str = "qwen2_moe") -> str:
    """Write a mixture with `num_experts` copies of each MLP of a Qwen2 model; return the folder's name."""
    source = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    fields = {name: getattr(source.config, name) for name in _COPIED}
    config = _CONFIGS[family](
        **fields,
        head_dim=source.config.hidden_size // source.config.num_attention_heads,
        num_experts=num_experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        moe_intermediate_size=source.config.intermediate_size,
        decoder_sparse_step=1,
    )
    torch.manual_seed(0)
    mixture = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights: dict[str, Tensor] = source.state_dict()
    own = mixture.state_dict()
    for name, tensor in own.items():
        layer, _, inner = name.partition(".mlp.")
        if inner == "experts.gate_up_proj":
            both = torch.cat([weights[f"{layer}.mlp.gate_proj.weight"], weights[f"{layer}.mlp.up_proj.weight"]])
            tensor.copy_(both.expand(num_experts, -1, -1))
        elif inner == "experts.down_proj":
            tensor.copy_(weights[f"{layer}.mlp.down_proj.weight"].expand(num_experts, -1, -1))
        elif inner == "shared_expert.down_proj.weight":
            tensor.zero_()
        elif name in weights:
            tensor.copy_(weights[name])
        if ".mlp.experts." in name:
            tensor.add_(_APART * tensor.std() * torch.randn_like(tensor))
    mixture.save_pretrained(folder)
    AutoTokenizer.from_pretrained(dense).save_pretrained(folder)
    return str(folder)
