"""Spread a model over the ranks: division of layers, FSDP2, precision, activation checkpointing, offload.

Invariant: after backward each gradient is the SUM over ranks that work on different tokens, because losses are divided
by global token counts already; and nothing here renames a parameter.
"""

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.ranks.collectives import all_gather
from nemo_rl.models.dtensor.experts.parallel import (
    dispatch_over_expert_ranks,
    divide_over_tensor_ranks,
    find_experts,
    require_experts,
    shard_experts,
)
from nemo_rl.models.dtensor.mesh import Meshes
from nemo_rl.models.dtensor.tensor_parallel.apply import TensorParallel, divide_layers
from nemo_rl.models.dtensor.tensor_parallel.plans import plan_for
from nemo_rl.models.huggingface.layers import decoder_layers, hidden_states
from nemo_rl.models.huggingface.load import torch_dtype
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)

KEPT_OPERATORS = frozenset(
    (
        *("aten::mm", "aten::addmm", "aten::_grouped_mm"),
        *("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention"),
        *("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"),
        *("torch_attn::_varlen_attn", "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"),
    )
)
"""Operators whose outputs selective checkpointing keeps: every matrix product but those of eager attention, whose
outputs grow with the square of the length, and every attention kernel that `dtensor.attention` may call."""


class ShardableModel(nn.Module):
    """What `shard` needs of a wrapper, as a type: `causal_lm` and `reward_model` have it.

    Attributes:
        hf: the wrapped Hugging Face model.
        tp_group: the ranks that divide each layer; None: there is one.
        sequence_parallel: whether they divide the hidden states of a row between layers, too.
    """

    hf: PreTrainedModel
    tp_group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False

    def whole_rows(self, hidden: Tensor, *, partial_gradient: bool) -> Tensor:
        """`[b, T, D]` from what the body gives this rank: `[b, T / tp, D]` with sequence parallelism.

        Args:
            hidden: the body's output.
            partial_gradient: whether what follows gives each rank a part of the gradient, or each the whole.
        """
        if not self.sequence_parallel:
            return hidden
        return all_gather(hidden, 1, self.tp_group, partial_gradient=partial_gradient)

    def body(self, model_inputs: dict[str, Any]) -> Tensor:
        """`[b, T, D]` hidden states behind this rank's layers: what a pipeline stage hands on."""
        return hidden_states(self.hf, model_inputs)


@dataclass(frozen=True)
class ShardingSpec:
    """Options of `shard`.

    Attributes:
        compute_dtype: dtype of the forward and backward pass; parameters stay float32.
        cpu_offload: keep parameters, gradients and optimizer state in host memory.
        device: where the rank computes.
        sequence_parallel: divide norms and the residual stream along the sequence between tensor-parallel ranks.
        custom_plan: dotted path of a tensor-parallel plan; None takes the model's own.
        keep_experts: whether the experts of a layer stay gathered between forward and backward pass.
        keep_gathered: gather parameters once for a whole run of microbatches, until `reshard` (pipeline stages).
        recompute: recompute activations in the backward pass: all of them, or those that are cheap to compute.
    """

    compute_dtype: torch.dtype
    cpu_offload: bool
    device: torch.device
    sequence_parallel: bool = False
    custom_plan: str | None = None
    keep_experts: bool = False
    keep_gathered: bool = False
    recompute: bool | Literal["selective"] = False

    @classmethod
    def of(cls, config: PolicyConfig, device: torch.device) -> "ShardingSpec":
        """What a policy section asks for."""
        asked = config.dtensor_cfg
        return cls(
            torch_dtype(config.precision),
            asked.cpu_offload,
            device,
            sequence_parallel=asked.sequence_parallel,
            custom_plan=asked.custom_parallel_plan,
            keep_experts=asked.moe_parallelizer.reshard_after_forward is False,
            keep_gathered=asked.pipeline_parallel_size > 1,
            recompute=asked.activation_checkpointing,
        )


def enable_activation_checkpointing(hf: PreTrainedModel, *, selective: bool = False) -> None:
    """Recompute each decoder layer's activations in the backward pass (training mode only).

    Args:
        hf: the model.
        selective: keep what is dear to recompute, the outputs of matrix products and attention; a layer then keeps
            about as many bytes as its linear layers put out, and its recomputation runs no matrix product.

    Raises:
        ConfigError: the architecture does not support it.
    """
    if not hf.supports_gradient_checkpointing:
        raise ConfigError(
            f"{type(hf).__name__} does not support activation checkpointing. "
            "Set policy.dtensor_cfg.activation_checkpointing=false."
        )
    kept: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, _keep_if_dear)}
    hf.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False} | (kept if selective else {})
    )


def _keep_if_dear(context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    dear = operator.name() in KEPT_OPERATORS
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


@torch.no_grad()
def hold_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Round all parameters once to the dtype that FSDP2 would round them to in every pass; buffers stay."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def shard[ModelT: ShardableModel](model: ModelT, meshes: Meshes, spec: ShardingSpec) -> ModelT:
    """Divide layers, then shard decoder layers and root with FSDP2, in place.

    `materialize` puts what has no memory yet on its device.

    One float32 rank of a stage is left as it is: there is nothing to shard or to cast, and on one CPU core FSDP2's
    hooks cost a step of a 2-million-parameter model 18 % at 512 tokens (2048 tokens: nothing; a
    0.26-million-parameter model at 256 tokens: 54 %).

    Args:
        model: the wrapped model, parameters in float32 on the CPU or the meta device.
        meshes: who divides what with whom.
        spec: precision, offload and device.
    """
    if spec.recompute:
        enable_activation_checkpointing(model.hf, selective=spec.recompute == "selective")
    one_rank = meshes.layout.num_ranks == meshes.layout.pp
    if one_rank and spec.compute_dtype == torch.float32 and not spec.cpu_offload:
        return model
    if meshes.layout.tp > 1:
        _divide_layers(model, meshes, spec)
    if meshes.layout.ep > 1:
        _share_experts(model.hf, meshes, spec)
    options: dict[str, Any] = {"mesh": meshes.fsdp, "offload_policy": _offload_policy(spec)}
    if spec.keep_gathered:
        options["reshard_after_forward"] = False
    for layer in decoder_layers(model.hf):
        fully_shard(layer, mp_policy=_precision(spec, root=False), **options)
    fully_shard(model, mp_policy=_precision(spec, root=True), **options)
    register_fsdp_forward_method(model, "body")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reshard_after_backward(not spec.keep_gathered, recurse=False)
    _move_buffers(model, spec.device)
    return model


def _divide_layers(model: ShardableModel, meshes: Meshes, spec: ShardingSpec) -> None:
    """Tensor parallelism; experts are divided one by one, unless expert-parallel ranks share them."""
    experts = find_experts(model.hf)
    dispatched = meshes.layout.ep > 1
    if experts and not dispatched:
        for module in require_experts(model.hf, meshes.layout.tp, "tensor_parallel_size").values():
            divide_over_tensor_ranks(module, meshes.tp)
    model.tp_group, model.sequence_parallel = meshes.tp_group, spec.sequence_parallel
    tensor = TensorParallel(meshes.tp, spec.sequence_parallel)
    plan = plan_for(model.hf, spec.custom_plan)
    divide_layers(model.hf, plan, tensor, experts=list(experts), dispatched=dispatched)


def _share_experts(hf: PreTrainedModel, meshes: Meshes, spec: ShardingSpec) -> None:
    """Expert parallelism; the experts of a layer are sharded apart from the rest of it."""
    for experts in require_experts(hf, meshes.layout.ep).values():
        dispatch_over_expert_ranks(experts, meshes.ep)
        shard_experts(
            experts,
            meshes.expert_fsdp,
            _precision(spec, root=False),
            _offload_policy(spec),
            reshard_after_forward=not (spec.keep_experts or spec.keep_gathered),
        )


def reshard(model: nn.Module) -> None:
    """Free gathered parameters after a pass without backward, or after a run of microbatches through a pipeline.

    FSDP2 keeps the root gathered after such a pass, and everything with `keep_gathered`; a later change of the shards
    (optimizer step, reference weights) would then go unnoticed by the next forward.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _precision(spec: ShardingSpec, *, root: bool) -> MixedPrecisionPolicy:
    """bfloat16 or float16 compute with float32 gradient reduction; outputs widened at the root only."""
    if spec.compute_dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=spec.compute_dtype,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32 if root else None,
    )


def _offload_policy(spec: ShardingSpec) -> OffloadPolicy:
    if not spec.cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Bring buffers (rotary frequencies) to the device; with offload FSDP leaves them on the CPU."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device and not buffer.is_meta:
                setattr(module, name, buffer.to(device))
