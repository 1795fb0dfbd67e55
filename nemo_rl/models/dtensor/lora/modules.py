"""Low-rank adapters on a frozen model (LoRA, Hu et al. 2021, arXiv:2106.09685).

`apply_lora` adds adapters after the model is made and before it is sharded; `adapter_io` writes the adapters; weight
sync and checkpoints read merged weights. Invariant: base weights never change. Code outside of `models.dtensor` sees
plain weights under Hugging Face names; each is merged when it is read.

FSDP2 and tensor parallelism divide an adapted layer's weight `[out, in]` and its B `[out, dim]` by the same rows, and A
`[dim, in]` by the weight's columns. So a rank merges its own part, and only the small A is gathered.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.config import LoraConfig
from nemo_rl.distributed.ranks.placements import held_here, whole
from nemo_rl.models.dtensor.checkpoints.model_files import weights_by_name
from nemo_rl.models.dtensor.pipeline.weights import joined
from nemo_rl.models.huggingface.layers import parts_without_text
from nemo_rl.models.training.low_rank import ADAPTER_PARAMETERS, generator_of, initial_a, require_moved, select_modules
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)

SECTION = "policy.dtensor_cfg.lora_cfg"


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trained product of two low-rank matrices.

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
        """`[out, in]`, frozen; the base layer's own parameter, so its name does not change."""
        self.bias = base.bias if base.bias is None else base.bias.requires_grad_(False)
        """`[out]`, frozen, or None."""
        a = initial_a(config.dim, base.in_features, config.lora_A_init, base.weight.dtype, generator)
        self.lora_A = nn.Parameter(a if base.weight.is_meta else a.to(base.weight.device))
        """`[dim, in]`."""
        self.lora_B = nn.Parameter(self.lora_A.new_zeros(base.out_features, config.dim))
        """`[out, dim]`, zero at the start, so that a new adapter changes nothing."""
        self.scaling = config.alpha / config.dim
        self.dropout, self.dropout_position = config.dropout, config.dropout_position
        self.active = True
        """False computes the base layer only."""

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
        """Return `W + (alpha / dim) B A` as a new tensor on `device`, sharded like W; collective if sharded."""
        a, b, weight = (t.detach().to(device) for t in (self.lora_A, self.lora_B, self.weight))
        if not isinstance(weight, DTensor):
            return torch.addmm(weight, b, a, alpha=self.scaling)
        assert isinstance(a, DTensor) and isinstance(b, DTensor), "adapters are sharded with their layer"
        _, (_, first) = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        own = weight.to_local()
        a_own = whole(a)[:, first : first + own.shape[1]]
        local = torch.addmm(own, b.to_local(), a_own, alpha=self.scaling)
        return DTensor.from_local(
            local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )


def apply_lora(hf: PreTrainedModel, config: LoraConfig, seed: int) -> list[str]:
    """Freeze the model and put adapters on its linear layers, in place; call it before sharding.

    A is drawn from the run's seed and the layer's name, so all ranks and every start draw the same.

    Args:
        hf: the unsharded model.
        config: the layers to adapt, and the adapters' shape.
        seed: run seed.

    Returns:
        Names of the adapted layers.

    Raises:
        ConfigError: a pattern matches no linear layer, no layer is left, or an adapted layer shares its weight.
    """
    names = select_modules(_linear_names(hf), config, SECTION)
    _refuse_shared(hf, names)
    hf.requires_grad_(False)
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
    """Return the adapted layers by name; empty without LoRA."""
    return {name: module for name, module in hf.named_modules() if isinstance(module, LoraLinear)}


def merged_by_name(hf: nn.Module, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield `checkpoint_io.weights_by_name` with each adapter merged into its layer's weight.

    Merged weights are computed one at a time, on `device`; all others are the model's own tensors. All
    ranks must exhaust it together.
    """
    adapted = adapted_modules(hf)
    for name, tensor in weights_by_name(hf).items():
        owner, _, last = name.rpartition(".")
        if owner not in adapted:
            yield name, tensor
        elif last == "weight":
            yield name, adapted[owner].merged_weight(device)
        elif last not in ADAPTER_PARAMETERS:
            yield name, tensor


def merge_adapters(hf: nn.Module) -> None:
    """Replace adapted layers with plain layers that hold the merged weights; for unsharded models only."""
    for name, module in adapted_modules(hf).items():
        merged = nn.Linear(module.in_features, module.out_features, bias=False, device="meta").train(module.training)
        merged.weight = nn.Parameter(module.merged_weight(module.weight.device), requires_grad=False)
        if module.bias is not None:
            merged.bias = nn.Parameter(module.bias, requires_grad=False)
        parent_name, _, child = name.rpartition(".")
        setattr(hf.get_submodule(parent_name), child, merged)


@torch.no_grad()
def check_adapters_moved(hf: nn.Module, device: torch.device) -> None:
    """Check after an update that every adapter changes its layer; collective.

    Raises:
        ConfigError: see `low_rank.require_moved`.
    """
    mine = {name: int(held_here(module.lora_B).count_nonzero()) for name, module in adapted_modules(hf).items()}
    modules = joined(hf, mine)
    moved = torch.tensor(list(modules.values()), device=device)
    dist.all_reduce(moved)
    require_moved(dict(zip(modules, moved.tolist(), strict=True)), SECTION)


def _refuse_shared(hf: PreTrainedModel, names: Sequence[str]) -> None:
    """Refuse adapters on a shared weight: it is exported as one value, but an adapter changes only one use of it."""
    uses = Counter(id(parameter) for _, parameter in hf.named_parameters(remove_duplicate=False))
    shared = [name for name in names if uses[id(hf.get_parameter(f"{name}.weight"))] > 1]
    if shared:
        raise ConfigError(
            f"policy.dtensor_cfg.lora_cfg adapts layers whose weight is shared with others: {', '.join(shared)}. "
            "Name them in policy.dtensor_cfg.lora_cfg.exclude_modules."
        )


def _linear_names(hf: PreTrainedModel) -> list[str]:
    """Return the names of plain linear layers that read text.

    The output head is left out, because it is applied in chunks as a bare weight.
    """
    others = {id(module) for part in parts_without_text(hf) for module in part.modules()} | {
        id(hf.get_output_embeddings())
    }
    return [name for name, module in hf.named_modules() if type(module) is nn.Linear and id(module) not in others]
