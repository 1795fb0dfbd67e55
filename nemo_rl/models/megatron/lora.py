"""Add LoRA adapters to Megatron Core's linear layers, and read and write their files.

An adapted layer computes `y = x W^T + (alpha / dim) x A^T B^T`, with tensor, sequence, pipeline and context
parallelism. If ranks divide the rows of W, they also divide the rows of B, and each rank has the whole A. If ranks
divide the columns of W, they also divide the columns of A, and each rank has the whole B. For an undivided layer, each
rank has the whole A and B. Only the activations between A and B, of width `dim`, are communicated:

    rows divided       x [s, b, in] A^T, gathered along the sequence (or with summed gradient), then own rows of B
    columns divided    own columns of x and A, summed, or summed and scattered along the sequence, then B

If tensor-parallel ranks have different tokens (sequence parallelism), the gradient of a whole A or B comes from the
rank's own tokens only. Such a parameter is marked `sequence_parallel`, and Megatron Core sums its gradient over the
ranks, as it does for norms. In all other cases each rank has the whole gradient of its parameters.

A checkpoint holds base weights and adapters among its tensors, from which a run resumes. It also holds a copy of the
adapter in `adapter/`, in the format of the PEFT library and under Hugging Face names. A layer of Megatron Core may
combine several hub layers (query, key and value, or gate and up). The hub layers share the layer's A, and each has its
own rows of B.

The head of a reward model or critic has no adapter. It is trained as a whole and saved with the adapter.

Invariant: base weights never change. Values do not depend on the mesh. Code outside of this package sees merged
weights. Base plus `adapter/` is the merged model.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE, TEColumnParallelLinear, TERowParallelLinear
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from transformers import PretrainedConfig

from nemo_rl.config.schema.model.megatron import MEGATRON_LINEAR_LAYERS, MegatronPeftConfig
from nemo_rl.files.regular_file import read_text
from nemo_rl.models.huggingface.comparison import is_classifier
from nemo_rl.models.huggingface.folders import (
    ADAPTER_FOLDER,
    CONFIG_FILE,
    PEFT_PREFIX,
    peft_config,
    peft_key,
    write_adapter,
)
from nemo_rl.models.huggingface.load import torch_dtype
from nemo_rl.models.megatron.checkpoints.folder import stored_blocks
from nemo_rl.models.megatron.conversion.holdings import Groups, held_tensors
from nemo_rl.models.megatron.conversion.parts import Part, Rule, global_name
from nemo_rl.models.megatron.conversion.rules import OUTPUT, SCALAR_HEAD, Rules, rules_for
from nemo_rl.models.megatron.model.build import unwrap
from nemo_rl.models.megatron.model.layers import with_output_norm
from nemo_rl.models.megatron.scoring import ScalarHead
from nemo_rl.models.training.low_rank import (
    ADAPTER_PARAMETERS,
    generator_of,
    initial_a,
    merged,
    require_moved,
    select_layers,
)
from nemo_rl.models.training.torch_backend import Keep, Write, as_it_is
from nemo_rl.utils.errors import CheckpointError
from nemo_rl.weight_sync.exchange import everywhere
from nemo_rl.weight_sync.parts import ReadableWeights

logger = logging.getLogger(__name__)

SECTION = "policy.megatron_cfg.peft"
_COLUMN_PARALLEL = (ColumnParallelLinear, *((TEColumnParallelLinear,) if HAVE_TE else ()))
_ROW_PARALLEL = (RowParallelLinear, *((TERowParallelLinear,) if HAVE_TE else ()))


@dataclass
class Adapter:
    """Settings of a layer's adapter, without its parameters."""

    name: str
    """Name of the layer in the whole model."""
    divided: Literal["rows", "columns"] | None
    """The dimension of the layer's weight that tensor-parallel ranks divide: its rows (Megatron Core transposes weights
    and calls this column-parallel), its columns, or None."""
    group: dist.ProcessGroup
    """The tensor-parallel ranks."""
    sequence_parallel: bool
    """Whether the tensor-parallel ranks have different tokens outside of divided layers."""
    gated: bool
    """Whether the layer's rows are those of gate followed by those of up."""
    blocks: Mapping[str, int]
    """Numbers of this rank's rows of each block of the layer, by the block's name in a checkpoint. Empty if the layer
    is no projection of several blocks."""
    scaling: float
    """Factor of the adapter's output, `alpha / dim`."""
    dropout: float
    """Dropout probability in training."""
    dropout_position: str
    """Location of the dropout: on the input (`pre`) or on the output (`post`)."""
    active: bool = True
    """Whether the layer adds the adapter's output."""

    @property
    def dims(self) -> dict[str, int]:
        """Return the dimension along which ranks divide each divided parameter of the adapter, by name."""
        return {"rows": {"lora_B": 0}, "columns": {"lora_A": 1}}.get(self.divided or "", {})

    def update(self, x: Tensor, a: Tensor, b: Tensor, training: bool) -> Tensor:
        """Compute this rank's `(alpha / dim) x A^T B^T`, in the layout of the base layer's output.

        Args:
            a: this rank's columns of A.
            b: this rank's rows of B.
            training: whether dropout is on.
        """
        x = x.to(a.dtype)
        if self.dropout_position == "pre":
            x = self._dropped(x, training, differs=self.divided == "columns" or self.sequence_parallel)
        thin = F.linear(x, a)
        if self.divided == "rows" and self.sequence_parallel:
            thin = gather_from_sequence_parallel_region(thin, group=self.group)
        elif self.divided == "rows":
            thin = copy_to_tensor_model_parallel_region(thin, group=self.group)
        elif self.divided == "columns" and self.sequence_parallel:
            thin = reduce_scatter_to_sequence_parallel_region(thin, group=self.group)
        elif self.divided == "columns":
            thin = reduce_from_tensor_model_parallel_region(thin, group=self.group)
        update = F.linear(thin, b)
        if self.dropout_position == "post":
            update = self._dropped(update, training, differs=self.divided == "rows" or self.sequence_parallel)
        return self.scaling * update

    def _dropped(self, x: Tensor, training: bool, *, differs: bool) -> Tensor:
        """Apply dropout. If `differs` (tensor-parallel ranks have different values), each rank draws its own mask."""
        if self.dropout == 0.0 or not training:
            return x
        if not differs:
            return F.dropout(x, self.dropout)
        with get_cuda_rng_tracker().fork():
            return F.dropout(x, self.dropout)


@cache
def _adapted(linear: Any) -> type[nn.Module]:
    """Return a subclass of a linear layer with an adapter. `_adapt` changes the class of a layer to it."""
    if (parts := getattr(linear, "output_norm", None)) is not None:
        inner: Any = _adapted(parts[0])
        return with_output_norm(inner, parts[1])

    class Adapted(linear):
        adapter: Adapter

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            out, bias = super().forward(x)
            if self.adapter.active:
                update = self.adapter.update(x, self.lora_A, self.lora_B, self.training)
                out = out + update.to(out.dtype)
            return out, bias

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
        ) -> dict[str, Any]:
            """Return the sharded state. Without this method Megatron Core would treat adapters as undivided."""
            assert metadata is not None
            groups = {"tp_group": self.adapter.group, "dp_cp_group": metadata["dp_cp_group"]}
            if hasattr(linear, "sharded_state_dict"):
                found = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            else:
                kept = self.state_dict(prefix="", keep_vars=True)
                found = make_sharded_tensors_for_checkpoint(kept, prefix, {}, sharded_offsets, **groups)
            own = {name: getattr(self, name) for name in ADAPTER_PARAMETERS}
            found |= make_sharded_tensors_for_checkpoint(own, prefix, self.adapter.dims, sharded_offsets, **groups)
            if self.adapter.gated:
                whole, singleton = found[f"{prefix}lora_B"], metadata.get("singleton_local_shards", False)
                found[f"{prefix}lora_B"] = apply_swiglu_sharded_factory(whole, sharded_offsets, singleton)
            if blocks := self.adapter.blocks:
                parts = list(blocks.values()), list(blocks)
                found[f"{prefix}lora_B"] = _split_tensor_factory(found[f"{prefix}lora_B"], *parts, 0)
            return found

    return Adapted


def apply_lora(
    chunks: Sequence[nn.Module], hf_config: PretrainedConfig, config: MegatronPeftConfig, seed: int
) -> list[str]:
    """Freeze the chunks, and add adapters to their linear layers in place, before `optimizer.with_gradients`.

    Args:
        chunks: the rank's virtual stages, unwrapped.
        config: the section `policy.megatron_cfg.peft`.
        seed: run seed, for the initial values of A.

    Returns:
        Names of the adapted layers of the whole model, in model order.

    Raises:
        ConfigError: a pattern matches no linear layer, or no layer is selected.
    """
    rules = rules_for(hf_config)
    names = select_layers(linear_layers(rules), config.target_modules, config.exclude_modules, SECTION)
    for chunk in chunks:
        model = unwrap(chunk)
        model.requires_grad_(False)
        if (head := _scalar_head(model)) is not None:
            head.requires_grad_(True)
        numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
        for own, module in list(model.named_modules()):
            name = global_name(own, numbers, 0)
            if name in names:
                _adapt(module, rules.by_parameter[f"{name}.weight"], model.config, config, seed)
        if model.pre_process:
            # # The embedding is frozen, but recomputed layers have gradients only if its output requires a gradient.
            model.embedding.register_forward_hook(_with_gradient)
    has_experts = any(rule.expert is not None for rule in rules.by_parameter.values())
    logger.info(
        "LoRA: %d adapted layers of Megatron Core%s.",
        len(names),
        "; routed experts have no adapters and stay as they are" if has_experts else "",
    )
    return names


def _scalar_head(model: nn.Module) -> ScalarHead | None:
    """Return the head of a reward model or critic if this virtual stage has it."""
    head = getattr(model, "output_layer", None)
    return head if isinstance(head, ScalarHead) else None


def linear_layers(rules: Rules) -> list[str]:
    """Return the names of the whole model's linear layers that support adapters, in model order."""
    known = (rule for rule in rules.by_parameter.values() if rule.expert is None and not rule.without_adapter)
    names = [rule.parameter.removesuffix(".weight") for rule in known if rule.parameter.endswith(".weight")]
    return [name for name in names if name.rpartition(".")[2] in MEGATRON_LINEAR_LAYERS]


def adapted_modules(chunks: Sequence[nn.Module]) -> dict[str, Any]:
    """Return this rank's adapted layers by name in the whole model, or an empty dict without LoRA."""
    modules = (module for chunk in chunks for module in unwrap(chunk).modules())
    return {module.adapter.name: module for module in modules if isinstance(getattr(module, "adapter", None), Adapter)}


def check_adapters_moved(chunks: Sequence[nn.Module]) -> None:
    """Check after an update that every adapter changes its layer. The call is collective.

    Raises:
        ConfigError: raised by `low_rank.require_moved`.
    """
    mine = {name: int(module.lora_B.count_nonzero()) for name, module in adapted_modules(chunks).items()}
    found: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, mine)
    names = dict.fromkeys(name for part in found for name in part)
    require_moved({name: sum(part.get(name, 0) for part in found) for name in names}, SECTION)


class MergedWeights:
    """Callable that returns a parameter's exported weight, with the layer's adapter merged if there is one.

    Args:
        chunks: the rank's virtual stages.
        dtype: dtype in which weights are exported; if None, the dtype of each parameter.
    """

    def __init__(self, chunks: Sequence[nn.Module], dtype: torch.dtype | None) -> None:
        self._adapted = {id(module.weight): module for module in adapted_modules(chunks).values()}
        self._dtype = dtype
        self.differ = False
        """Whether any merged weight so far differs from its base weight after both are rounded to `dtype`."""

    def __call__(self, parameter: Tensor) -> Tensor:
        """Return this rank's shard of a parameter, or a new tensor `W + (alpha / dim) B A` if the layer is adapted."""
        module = self._adapted.get(id(parameter))
        if module is None:
            return parameter.detach()
        base = parameter.detach()
        weight = merged(base, module.lora_A, module.lora_B, module.adapter.scaling)
        if not self.differ:
            dtype = self._dtype or base.dtype
            self.differ = not torch.equal(weight.to(dtype), base.to(dtype))
        return weight


def _adapt(module: nn.Module, rule: Rule, options: TransformerConfig, config: MegatronPeftConfig, seed: int) -> None:
    """Add an adapter to a layer.

    Args:
        rule: rule of the layer's weight.
    """
    layer: Any = module
    name, group = rule.parameter.removesuffix(".weight"), Groups.current().tensor
    divided: Literal["rows", "columns"] | None = None
    if isinstance(module, _COLUMN_PARALLEL):
        divided = "rows"
    elif isinstance(module, _ROW_PARALLEL):
        divided = "columns"
    layer.adapter = Adapter(
        name,
        divided,
        group,
        sequence_parallel=options.sequence_parallel and group.size() > 1,
        gated=options.gated_linear_unit and name.endswith(".linear_fc1"),
        blocks={block: rows // group.size() for block, rows in stored_blocks(rule.layout).items()},
        scaling=config.alpha / config.dim,
        dropout=config.dropout,
        dropout_position=config.dropout_position,
    )
    dtype = layer.weight.dtype if config.lora_dtype is None else torch_dtype(config.lora_dtype)
    rows, columns = layer.weight.shape
    num_parts, part = (group.size(), group.rank()) if divided == "columns" else (1, 0)
    whole = initial_a(config.dim, columns * num_parts, config.lora_A_init_method, dtype, generator_of(seed, name))
    layer.lora_A = nn.Parameter(whole.chunk(num_parts, dim=1)[part].to(layer.weight.device, copy=True).contiguous())
    layer.lora_B = nn.Parameter(layer.lora_A.new_zeros(rows, config.dim))
    for parameter_name in ADAPTER_PARAMETERS:
        parameter, dim = getattr(layer, parameter_name), layer.adapter.dims.get(parameter_name)
        set_tensor_model_parallel_attributes(parameter, dim is not None, -1 if dim is None else dim, 1)
        parameter.sequence_parallel = dim is None and layer.adapter.sequence_parallel
    kind: Any = type(module)
    module.__class__ = _adapted(kind)


def _with_gradient(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def save_adapter(
    chunks: Sequence[nn.Module],
    hf_config: PretrainedConfig,
    config: MegatronPeftConfig,
    base_name: str,
    names: Sequence[str],
    weights_path: Path,
    keep: Keep = as_it_is,
) -> Write:
    """Prepare to write the adapter. All ranks must call this, and rank 0 writes.

    Args:
        chunks: the rank's virtual stages, wrapped or not.
        config: the section `policy.megatron_cfg.peft`.
        base_name: name of the base model, written into the adapter's configuration.
        names: names of the adapted layers, from `apply_lora`.
        weights_path: weights folder of the checkpoint.
        keep: applied to every tensor that will be written.
    """
    scores = is_classifier(hf_config)
    rules = rules_for(hf_config, has_scalar_head=scores)
    tensors = {
        f"{PEFT_PREFIX}{name}" if name == SCALAR_HEAD else peft_key(name): keep(f"adapter.{name}", tensor)
        for name, tensor in _hub_adapters(chunks, rules, names).items()
    }
    hub = dict.fromkeys(name for layer in names for name in _hub_layers(rules, layer))
    fused = any(rule.expert is not None for rule in rules.by_parameter.values())
    described = peft_config(config, base_name, list(hub), fused_experts=fused, scores=scores)
    return partial(write_adapter, weights_path / ADAPTER_FOLDER, tensors, described)


def check_adapter(weights_path: Path, config: MegatronPeftConfig) -> None:
    """Refuse a checkpoint if only the checkpoint or only the configuration uses LoRA, or if dim or alpha differ.

    Raises:
        CheckpointError: the checkpoint is refused; the message names the keys to set.
    """
    file = weights_path / ADAPTER_FOLDER / CONFIG_FILE
    if file.exists() != config.enabled:
        how, asked = ("with", "true") if file.exists() else ("without", "false")
        raise CheckpointError(
            f"{weights_path} was written {how} LoRA. Set policy.megatron_cfg.peft.enabled={asked} to resume, or start "
            "a new run from its model: export the checkpoint with examples/converters/convert_megatron_to_hf.py and "
            "set policy.model_name to that folder."
        )
    if not config.enabled:
        return
    described = json.loads(read_text(file))
    before = (described["r"], described["lora_alpha"])
    if before != (config.dim, config.alpha):
        raise CheckpointError(
            f"{weights_path} was written with policy.megatron_cfg.peft.dim={before[0]} and alpha={before[1]}, and this "
            f"run has dim={config.dim} and alpha={config.alpha}. Set them to the former."
        )


def _hub_layers(rules: Rules, name: str) -> list[str]:
    """Return the names in transformers of the layers that a layer of Megatron Core combines."""
    parts = rules.by_parameter[f"{name}.weight"].parts
    return [rules.module_name(part.name.removesuffix(".weight")) for part in parts]


@torch.no_grad()
def _hub_adapters(chunks: Sequence[nn.Module], rules: Rules, names: Sequence[str]) -> dict[str, Tensor]:
    """Gather `<layer>.lora_A` and `<layer>.lora_B` of each hub layer, and a scalar head, to the CPU.

    The call is collective.
    """
    modules = adapted_modules(chunks)
    held: dict[str, Tensor] = {}
    for name, module in modules.items():
        held |= {f"{name}.lora_A": module.lora_A, f"{name}.lora_B": module.lora_B}
    own: dict[str, Rule] = {}
    if rules.has_scalar_head:
        own[OUTPUT] = rules.by_parameter[OUTPUT]
        for chunk in chunks:
            if (head := _scalar_head(unwrap(chunk))) is not None:
                held[OUTPUT] = head.weight
    for name in names:
        weight = rules.by_parameter[f"{name}.weight"]
        a, b = f"{name}.lora_A", f"{name}.lora_B"
        own[a] = Rule(a, (Part(a),), dim=1 if weight.dim == 1 else None)
        own[b] = Rule(
            b,
            tuple(Part(f"{layer}.lora_B") for layer in _hub_layers(rules, name)),
            weight.layout,
            dim=0 if weight.dim == 0 else None,
        )
    device = next(chunks[0].parameters()).device
    weights = held_tensors(held, replace(rules, by_parameter=own), Groups.current(), device=device)
    whole = everywhere(ReadableWeights(weights, device), dist.group.WORLD)
    found = {name: tensor.to("cpu", copy=True) for name, tensor in whole}
    for name in names:
        shared, layers = found.pop(f"{name}.lora_A"), _hub_layers(rules, name)
        found |= {f"{layer}.lora_A": shared.clone() for layer in layers}
    return found
