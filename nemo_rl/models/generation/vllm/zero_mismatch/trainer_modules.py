"""Let vLLM compute a model with the trainer's own modules.

vLLM can run the modules of transformers (`vllm.model_executor.models.transformers`), with its own embedding, linear
layers, attention and output head. It also replaces norms and activations, joins projections, computes routers and
experts of mixtures with its own kernels, and keeps latents of latent attention in its cache. All of this rounds
otherwise. `keep_trainer_modules` leaves it as transformers computes it. Experts are the exception: vLLM holds their
weights, because a checkpoint and a sync of weights name each expert. `experts_of_tokens` computes what
`transformers.integrations.moe.grouped_mm_experts_forward` does with them.

Invariant: with `operations.compute_as_the_trainer`, a layer computes the trainer's operations in the trainer's order.
These functions run in vLLM's worker.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.model_executor.models.transformers import base, fuser
from vllm.model_executor.models.transformers.fusers import AttentionFuser, MoEBlockFuser
from vllm.model_executor.models.transformers.moe import TransformersMoERunner

CLASSES = ("TransformersForCausalLM", "TransformersMoEForCausalLM")
"""vLLM's names of its classes for models of transformers, without and with experts."""


def keep_trainer_modules() -> None:
    """Replace modules of transformers only where vLLM needs its own, in this process, before a model is built."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe  # vLLM also imports it on CPUs only

    fusers: Any = fuser
    models: Any = base
    blocks: Any = MoEBlockFuser
    runner: Any = TransformersMoERunner
    experts: Any = cpu_moe.CPUUnquantizedExperts
    os.environ["VLLM_MLA_DISABLE"] = "1"  # the cache holds keys and values of latent attention, as the trainer's
    fusers.FUSERS = (AttentionFuser,)
    models.replace_layernorm_class = _unchanged
    blocks.match = staticmethod(_no_block)
    runner.forward = _run_experts
    experts.process_weights_after_loading = _leave_unpacked


def _unchanged(module: nn.Module) -> nn.Module:
    return module


def _no_block(moe_block: nn.Module, experts_name: str) -> None:
    """Leave routers and shared experts of a mixture to transformers (`MoEBlockFuser.match`)."""


def _leave_unpacked(self: Any, layer: nn.Module) -> None:
    """Keep the weights of a layer's experts as they were loaded."""


def _run_experts(self: Any, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """Compute a layer's experts (`forward` of the module of experts in transformers), and report the choice."""
    if self.router.capture_fn is not None:
        self.router.capture_fn(topk_ids)
    weights = self.routed_experts
    return experts_of_tokens(hidden_states, weights.w13_weight, weights.w2_weight, topk_ids, topk_weights)


def experts_of_tokens(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Add the outputs of each token's experts, in the order in which the router chose them.

    Args:
        x: `[N, D]`.
        gate_up: `[E, 2 * I, D]`, each expert's gate projection and then its up projection.
        down: `[E, D, I]`.
        chosen: `[N, k]` int64, the experts of each token.
        shares: `[N, k]`, the factors of their outputs. With bfloat16 models, their format depends on the router.

    Returns:
        `[N, D]` in the number format of `x`.
    """
    experts, order = chosen.flatten().sort()
    counts = experts.bincount(minlength=len(gate_up)).tolist()
    gate, up = _of_each(x[order // chosen.shape[1]], gate_up, counts).chunk(2, dim=-1)
    outputs = _of_each(functional.silu(gate) * up, down, counts) * shares.flatten()[order, None]
    by_token = torch.empty_like(outputs)
    by_token[order] = outputs
    return by_token.unflatten(0, chosen.shape).sum(1).to(x.dtype)


def _of_each(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Multiply the first rows with the weight of the first expert, the next ones with the second, and so on."""
    parts = zip(rows.split(list(counts)), weights, strict=True)
    return torch.cat([functional.linear(part, weight) for part, weight in parts if len(part)])
