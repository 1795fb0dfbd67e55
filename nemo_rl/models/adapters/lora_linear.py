"""Compute a model with one LoRA adapter (Hu et al. 2021, arXiv:2106.09685) that is trained.

The trainer adds the layers before its model is sharded. An engine adds the same layers if a weight sync sends adapters
(`policy.generation.lora_refit_mode=adapter`). Invariants: parameters keep their names. Names and shapes of A and B are
equal in the trainer and in engines.

FSDP2 and tensor parallelism divide an adapted layer's weight `[out, in]` and its B `[out, dim]` by the same rows, and A
`[dim, in]` by the weight's columns. A rank therefore merges its own part, and only the small A is gathered.
"""

import logging
from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.config import LoraConfig
from nemo_rl.distributed.ranks.placements import whole
from nemo_rl.distributed.ranks.tensor_block import block_here
from nemo_rl.models.adapters.slots import linear_names
from nemo_rl.models.huggingface.layers import score_head
from nemo_rl.models.huggingface.recurrent import compute_unfused
from nemo_rl.models.training.low_rank import ADAPTER_PARAMETERS, generator_of, initial_a, select_modules
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)

SECTION = "policy.dtensor_cfg.lora_cfg"


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained product of two low-rank matrices.

    `y = x W^T + bias + (alpha / dim) x A^T B^T`. Dropout applies to x before A (`pre`) or to the product
    (`post`), in training mode only.

    Args:
        base: the layer to adapt; its parameters are reused and frozen.
        config: the adapter's shape and dropout.
        generator: random generator for A.
    """

    def __init__(self, base: nn.Linear, config: LoraConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight = base.weight.requires_grad_(False)
        """`[out, in]`, frozen. It is the base layer's own parameter, so its name does not change."""
        self.bias = base.bias if base.bias is None else base.bias.requires_grad_(False)
        """`[out]`, frozen, or None."""
        a = initial_a(config.dim, base.in_features, config.lora_A_init, base.weight.dtype, generator)
        self.lora_A = nn.Parameter(a if base.weight.is_meta else a.to(base.weight.device))
        """`[dim, in]`."""
        self.lora_B = nn.Parameter(self.lora_A.new_zeros(base.out_features, config.dim))
        """`[out, dim]`, zero at the start, so that a new adapter has no effect."""
        self.scaling = config.alpha / config.dim
        self.dropout, self.dropout_position = config.dropout, config.dropout_position
        self.active = True
        """If False, only the base layer is computed."""

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in]` to `[..., out]`."""
        out = F.linear(x, self.weight, self.bias)
        if not self.active:
            return out
        if self.dropout_position == "pre":
            x = F.dropout(x, self.dropout, self.training)
        update = F.linear(F.linear(x, self.lora_A), self.lora_B)
        if self.dropout_position == "post":
            update = F.dropout(update, self.dropout, self.training)
        return out + self.scaling * update

    @torch.no_grad()
    def merged_weight(self, device: torch.device) -> Tensor:
        """Return `W + (alpha / dim) B A` as a new tensor on `device`. The call is collective if W is sharded."""
        a, b, weight = (t.detach().to(device) for t in (self.lora_A, self.lora_B, self.weight))
        if not isinstance(weight, DTensor):
            return torch.addmm(weight, b, a, alpha=self.scaling)
        assert isinstance(a, DTensor) and isinstance(b, DTensor), "adapters are sharded with their layer"
        _, columns = block_here(weight).slices
        local = torch.addmm(weight.to_local(), b.to_local(), whole(a)[:, columns], alpha=self.scaling)
        return DTensor.from_local(
            local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )


def apply_lora(hf: PreTrainedModel, config: LoraConfig, seed: int) -> list[str]:
    """Freeze the model and add adapters to its linear layers in place, before sharding.

    The head of a sequence classifier is not frozen, because a language model as its base has no such head. A is drawn
    from the run's seed and the layer's name, so that it is equal on all ranks and after a restart.

    Args:
        hf: the unsharded model.
        config: the layers to adapt, and the adapters' shape.

    Returns:
        Names of the adapted layers.

    Raises:
        ConfigError: a pattern matches no linear layer, no layer is selected, or a selected layer shares its weight.
    """
    names = select_modules(linear_names(hf), config, SECTION)
    _refuse_shared(hf, names)
    compute_unfused(hf)
    hf.requires_grad_(False)
    head = score_head(hf)
    if head is not None:
        head.requires_grad_(True)
    for name in names:
        parent_name, _, child = name.rpartition(".")
        base = hf.get_submodule(name)
        assert isinstance(base, nn.Linear)
        adapted = LoraLinear(base, config, generator_of(seed, name)).train(base.training)
        setattr(hf.get_submodule(parent_name), child, adapted)
    trained = sum(p.numel() for p in hf.parameters() if p.requires_grad)
    total = sum(p.numel() for p in hf.parameters())
    logger.info(
        "LoRA: %d adapted layers, %d of %d parameters trained (%.2f %%).",
        len(names),
        trained,
        total,
        100 * trained / total,
    )
    return names


def adapted_modules(hf: nn.Module) -> dict[str, LoraLinear]:
    """Return the adapted layers by name. The dict is empty without LoRA."""
    return {name: module for name, module in hf.named_modules() if isinstance(module, LoraLinear)}


def adapter_parameters(hf: nn.Module) -> dict[str, Tensor]:
    """Return A and B of the adapted layers by their names `<layer>.lora_A` and `<layer>.lora_B`."""
    return {
        f"{name}.{last}": getattr(module, last)
        for name, module in adapted_modules(hf).items()
        for last in ADAPTER_PARAMETERS
    }


def _refuse_shared(hf: PreTrainedModel, names: Sequence[str]) -> None:
    """Refuse adapters on a weight that layers share, because the adapter would change only one of the layers."""
    uses = Counter(id(parameter) for _, parameter in hf.named_parameters(remove_duplicate=False))
    shared = [name for name in names if uses[id(hf.get_parameter(f"{name}.weight"))] > 1]
    if shared:
        raise ConfigError(
            f"policy.dtensor_cfg.lora_cfg adapts layers whose weight is shared with others: {', '.join(shared)}. "
            "Name them in policy.dtensor_cfg.lora_cfg.exclude_modules."
        )
