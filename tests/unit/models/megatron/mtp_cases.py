"""Losses and gradients of a small model with layers for multi-token prediction, computed by transformers' layers."""

from dataclasses import dataclass
from typing import Any

import torch
from mesh_parity import batch, count_of, loss_of
from mtp_models import WithMTP, places_of_layers
from small_models import hf_model
from torch import Tensor, nn
from witness import _block, _layer, global_tensors


def mtp_model(num_depths: int = 1, seed: int = 1, kind: str = "deepseek_v3", **values: Any) -> WithMTP:
    """Make the model, of one of `small_models`; `values` are of its configuration."""
    hf = hf_model(kind, seed, **{"num_hidden_layers": 4} | values)
    hf.set_experts_implementation("eager")
    return WithMTP(hf, num_depths, seed + 1)


def whole_tensors(model: WithMTP, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return tensors, or gradients, in the names of Megatron Core's whole model; see `witness`."""
    own = {name.removeprefix("hf."): tensor for name, tensor in tensors.items() if name.startswith("hf.")}
    out = global_tensors(model.config, own)
    for depth in range(len(model.depths)):
        of_depth = {
            name.removeprefix(f"depths.{depth}."): torch.zeros(0) if tensor is None else tensor
            for name, tensor in tensors.items()
            if name.startswith(f"depths.{depth}.")
        }
        prefix = f"mtp.layers.{depth}."
        for number, place in enumerate(places_of_layers(model.config)):
            own = {
                name.removeprefix(f"layers.{number}."): tensor
                for name, tensor in of_depth.items()
                if name.startswith(f"layers.{number}.")
            }
            found = _block(model.config, place, own) if "norm.weight" in own else _layer(model.config, own)
            out |= {f"{prefix}mtp_model_layer.{name}": tensor for name, tensor in found.items()}
        out |= {f"{prefix}{name}.weight": of_depth[f"{name}.weight"] for name in ("enorm", "hnorm", "eh_proj")}
        out[f"{prefix}final_layernorm.weight"] = of_depth["norm.weight"]
        if not model.config.model_type.startswith("qwen"):
            out.setdefault(f"{prefix}mtp_model_layer.mlp.router.expert_bias", torch.zeros(0))
    return out


@dataclass
class Losses:
    """Sums over a batch, and the gradients of one pass."""

    policy: float
    mtp: float
    agreement: list[float]
    gradients: dict[str, Tensor]


def reference(
    num_depths: int,
    factor: float,
    *,
    repeated: bool = False,
    detached: bool = False,
    step: int = 0,
    kind: str = "deepseek_v3",
) -> Losses:
    """Compute the losses of a batch and all gradients in float64, one unpadded row at a time."""
    model, data = mtp_model(1 if repeated else num_depths, kind=kind).double(), batch(step)
    logprobs, entropies, further = [], [], [[] for _ in range(num_depths)]
    mask = data["token_mask"] * data["sample_mask"][:, None]
    width = data["input_ids"].shape[1]
    for row, length in enumerate(data["input_lengths"].tolist()):
        ids = data["input_ids"][row, :length]
        first, *rest = model.hidden_of_depths(ids, num_depths, repeated=repeated)
        log_p = model.hf.lm_head(first[:-1]).log_softmax(-1)
        pad = (0, width - length)
        logprobs.append(nn.functional.pad(log_p.gather(-1, ids[1:, None])[:, 0], pad))
        entropies.append(nn.functional.pad(-(log_p.exp() * log_p).sum(-1), pad))
        for depth, hidden in enumerate(rest, start=1):
            targets = ids[depth + 1 :]
            log_q = model.hf.lm_head(hidden[:-1]).log_softmax(-1)
            counted = mask[row, depth + 1 : length] > 0
            lost = -log_q.gather(-1, targets[:, None])[:, 0]
            further[depth - 1].append((lost[counted], (log_q.argmax(-1) == targets)[counted]))
    policy = loss_of(torch.stack(logprobs), torch.stack(entropies), data, count_of(data))
    means = [torch.cat([lost for lost, _ in rows]).mean() for rows in further]
    agreement = [torch.cat([right for _, right in rows]).double().mean().item() for rows in further]
    mtp = torch.stack(means).mean()
    if detached:
        gradients = _detached(model, policy, factor * mtp)
    else:
        (policy + factor * mtp).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Losses(policy.item(), mtp.item(), agreement, whole_tensors(model, gradients))


def _detached(model: WithMTP, policy: Tensor, mtp: Tensor) -> dict[str, Tensor | None]:
    """Return the gradients of one loss for the model, and of the other for the layers that it adds.

    With several depths that is not the gradient of detached heads, which also reaches earlier depths.
    """
    named = dict(model.named_parameters())
    own = {name: parameter for name, parameter in named.items() if name.startswith("depths.")}
    others = {name: parameter for name, parameter in named.items() if name not in own}
    of_mtp = torch.autograd.grad(mtp, list(own.values()), retain_graph=True)
    of_policy = torch.autograd.grad(policy, list(others.values()), allow_unused=True)
    return dict(zip(own, of_mtp, strict=True)) | dict(zip(others, of_policy, strict=True))
