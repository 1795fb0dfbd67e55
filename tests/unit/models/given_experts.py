"""Layers of experts in plain PyTorch that are told which experts each token has, as a reference for router replay."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the blocks with experts, in the order of the layers."""
    return [module for module in model.modules() if hasattr(module, "experts") and hasattr(module, "gate")]


class GivenExperts:
    """Replaces the blocks with experts of a Qwen3-MoE or DeepSeek-V3 model by sums over given experts.

    Attributes:
        experts: `[T, L, k]` int64 of the row that the model reads next.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.experts = torch.empty(0)
        weigh = _sigmoids if model.config.model_type == "deepseek_v3" else _softmax
        for layer, block in enumerate(blocks_of(model)):
            block.forward = partial(self._sum, block, weigh, layer)

    def _sum(self, block: Any, weigh: Any, layer: int, hidden: Tensor) -> Tensor:
        rows, chosen = hidden.flatten(0, 1), self.experts[:, layer]
        weights, output = weigh(block, rows, chosen), torch.zeros_like(rows)
        for number in range(block.experts.num_experts):
            gate, up = (rows @ block.experts.gate_up_proj[number].T).chunk(2, -1)
            of_expert = (nn.functional.silu(gate) * up) @ block.experts.down_proj[number].T
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            output = output + share * of_expert
        if hasattr(block, "shared_experts"):
            output = output + block.shared_experts(rows)
        return output.view_as(hidden)


def _softmax(block: Any, rows: Tensor, chosen: Tensor) -> Tensor:
    weights = (rows @ block.gate.weight.T).softmax(-1).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) if block.gate.norm_topk_prob else weights


def _sigmoids(block: Any, rows: Tensor, chosen: Tensor) -> Tensor:
    weights = (rows @ block.gate.weight.T).sigmoid().gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) * block.gate.routed_scaling_factor


def random_experts(model: PreTrainedModel, rows: int, width: int, seed: int = 0) -> Tensor:
    """Return `[rows, width, L, k]` int8: different experts for each token, whatever its scores."""
    config, layers = model.config, len(blocks_of(model))
    number = blocks_of(model)[0].experts.num_experts
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand((rows, width, layers, number), generator=generator)
    return noise.argsort(-1)[..., : config.num_experts_per_tok].to(torch.int8)


def logprobs_given(model: PreTrainedModel, data: Any) -> Tensor:
    """Return `[B, T]` log-probabilities with their graph, one row at a time, with the experts of the batch."""
    given, rows = GivenExperts(model), []
    for ids, length, experts in zip(
        data["input_ids"], data["input_lengths"].tolist(), data["routed_experts"], strict=True
    ):
        given.experts = experts[:length].long()
        logits = model(input_ids=ids[None, :length], use_cache=False).logits
        scores = torch.log_softmax(logits[0, :-1], -1).gather(-1, ids[1:length, None])[:, 0]
        rows.append(nn.functional.pad(scores, (1, len(ids) - length)))
    return torch.stack(rows)
