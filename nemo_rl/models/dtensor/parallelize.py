"""Divide a model among the ranks: layers, FSDP2, precision, compilation, activation checkpointing, offload.

Divide a model among the ranks: division of layers, FSDP2, precision, activation checkpointing, offload.

Invariant: after backward each gradient is the SUM over ranks with different tokens, because losses are already divided
by global token counts; and no parameter is renamed.

Compile the decoder layers of a model, so that chains of elementwise operations become one kernel. Each layer is
compiled separately, before FSDP2 shards it, and its hooks (gathering of weights, activation checkpointing) stay outside
of the compiled code. Attention is not compiled: it has kernels of its own. All layers of a kind share one compilation,
and sizes of microbatches are symbols in it, so a model compiles a few times per run.

Invariant: scores and gradients are those of uncompiled layers up to rounding. Compiled code in bfloat16 rounds less
often, because a chain's intermediate values stay in float32.

Compute with some parameters of a module in float32, while FSDP2 rounds the others. FSDP2 has one precision for the
parameters that it gathers together, and such a parameter may belong to the same module as others (`A_log` and the
projections of a mixer), or be read without a call of its module. So FSDP2 leaves them out of a module's first group,
and they become a second one of the same module, which its hooks gather at the same time.

Invariant: gradients of the second group are reduced in float32, over the same ranks.
"""

import logging
import os
import shutil
from collections.abc import Iterable
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
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)
from transformers import AttentionInterface
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_logprobs.fusion import has_triton
from nemo_rl.distributed.ranks.collectives import all_gather
from nemo_rl.models.dtensor.attention import VARLEN_ATTENTION, varlen_attention
from nemo_rl.models.dtensor.expert_parallel import (
    dispatch_over_expert_ranks,
    divide_over_tensor_ranks,
    find_experts,
    require_experts,
    shard_experts,
)
from nemo_rl.models.dtensor.mesh import Meshes
from nemo_rl.models.dtensor.tensor_parallel import TensorParallel, divide_layers
from nemo_rl.models.dtensor.tensor_plans import plan_for
from nemo_rl.models.huggingface.layers import decoder_layers, hidden_states
from nemo_rl.models.huggingface.load import float32_parameters, torch_dtype
from nemo_rl.utils.errors import ConfigError

COMPILES_ON_GPUS = False
"""Whether GPUs compile the layers of a run that leaves the key at null; the only place that decides it.

Set it to True when a GPU has passed the rows "compiled layers" (the numbers hold) and "compiled training step"
(`times_as_fast` above 1 for short and long rows) of `tools/gpu_check.py`; no GPU has run them. The tests of this file
show on CPUs that the numbers hold.
"""
_KEY = "policy.dtensor_cfg.compile_layers"
_MOST_VARIANTS = 32
"""Compilations of one function before torch gives up and runs it uncompiled: with and without gradients, for frozen
and trained inputs, and for padded rows, packed rows and rows that share tokens, for each kind of layer."""
_CPU_COMPILERS = ("g++", "clang++")


def wants_compiled(asked: bool | None, hf: PreTrainedModel, device: torch.device, *, fits: bool) -> bool:
    """Return whether to compile the layers of a model.

    Args:
        asked: the key; null leaves the choice to `COMPILES_ON_GPUS`, for models and settings with which it is possible.
        device: device on which it computes.
        fits: whether the other settings allow it, as far as the configuration does not refuse them already.
    """
    if asked is not None:
        return asked
    return COMPILES_ON_GPUS and device.type != "cpu" and fits and not find_experts(hf) and has_triton()


def compile_layers(hf: PreTrainedModel, device: torch.device) -> None:
    """Compile the forward pass of every decoder layer, in place, so that the first pass runs the compiler.

    Args:
        hf: the model, whose layers are divided among tensor-parallel ranks but not yet sharded by FSDP2.
        device: device on which the layers compute.

    Raises:
        ConfigError: the model has experts, or no compiler for the device is installed.
    """
    if find_experts(hf):
        raise ConfigError(
            f"{type(hf).__name__} routes tokens to experts, whose sizes differ in every microbatch, so its layers "
            f"cannot be compiled. Set {_KEY}=false."
        )
    _require_compiler(device)
    torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, _MOST_VARIANTS)
    AttentionInterface.register(VARLEN_ATTENTION, torch.compiler.disable(varlen_attention))
    for layer in decoder_layers(hf):
        compiled: Any = torch.compile(layer.forward, dynamic=True)
        layer.forward = compiled


def _require_compiler(device: torch.device) -> None:
    if device.type == "cpu":
        names = [os.environ["CXX"]] if "CXX" in os.environ else list(_CPU_COMPILERS)
        found, needed = any(shutil.which(name) for name in names), f"a C++ compiler ({' or '.join(names)})"
    else:
        found, needed = has_triton(), "triton, which the wheels of torch for GPUs install,"
    if not found:
        raise ConfigError(f"{_KEY}=true needs {needed}. Install it, or set {_KEY}=false.")


def shard_in_float32(module: nn.Module, parameters: Iterable[nn.Parameter], offload: OffloadPolicy) -> None:
    """Shard parameters that `fully_shard` was told to ignore, and compute with them in float32.

    Args:
        module: has been given to `fully_shard`, with `ignored_params`, and manages further parameters.
        parameters: of it or of its modules; on the meta device, or moved to the module's device here.
        offload: as in `fully_shard`.
    """
    chosen = list(parameters)
    if not chosen:
        return
    assert isinstance(module, FSDPModule), "fully_shard comes first"
    state: Any = module._get_fsdp_state()
    first = state._fsdp_param_groups[0]
    for parameter in chosen:
        if not parameter.is_meta:
            parameter.data = parameter.data.to(first.device)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    places = (first.modules, first.mesh_info, first.post_forward_mesh_info, first.device)
    state._fsdp_param_groups.append(FSDPParamGroup(chosen, *places, None, policy, offload))


logger = logging.getLogger(__name__)

KEPT_OPERATORS = frozenset(
    (
        *("aten::mm", "aten::addmm", "aten::_grouped_mm"),
        *("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention"),
        *("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"),
        *("torch_attn::_varlen_attn", "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"),
    )
)
"""Operators whose outputs selective checkpointing keeps: every matrix product except those of eager attention, whose
outputs grow with the square of the length, and every attention kernel that `dtensor.attention` may call."""


class ShardableModel(nn.Module):
    """Base class of the model wrappers in `heads`, as `shard` expects them."""

    hf: PreTrainedModel
    """The wrapped Hugging Face model."""
    tp_group: dist.ProcessGroup | None = None
    """The ranks that divide each layer; None if there is one rank."""
    sequence_parallel: bool = False
    """Whether these ranks also divide the hidden states of a row between layers."""

    def whole_rows(self, hidden: Tensor, *, partial_gradient: bool) -> Tensor:
        """Return `[b, T, D]` hidden states, gathered from `[b, T / tp, D]` with sequence parallelism.

        Args:
            hidden: the body's output.
            partial_gradient: whether the code that uses the result gives each rank a part of the gradient; False: the
                whole gradient.
        """
        if not self.sequence_parallel:
            return hidden
        return all_gather(hidden, 1, self.tp_group, partial_gradient=partial_gradient)

    def body(self, model_inputs: dict[str, Any]) -> Tensor:
        """Return the `[b, T, D]` hidden states after this rank's layers, which a pipeline stage sends on."""
        return hidden_states(self.hf, model_inputs)


@dataclass(frozen=True)
class ShardingSpec:
    """Options of `shard`."""

    compute_dtype: torch.dtype
    """Dtype of the forward and backward pass; master weights stay float32, and those of
    `huggingface.load.stays_float32` also compute in it."""
    cpu_offload: bool
    """Keep parameters, gradients and optimizer state in host memory."""
    device: torch.device
    """Device on which the rank computes."""
    sequence_parallel: bool = False
    """Divide norms and the residual stream along the sequence among tensor-parallel ranks."""
    custom_plan: str | None = None
    """Dotted path of a tensor-parallel plan; None takes the model's own."""
    keep_experts: bool = False
    """Whether the experts of a layer stay gathered between forward and backward pass."""
    keep_gathered: bool = False
    """Gather parameters once for all microbatches, until `reshard`."""
    recompute: bool | Literal["selective"] = False
    """Recompute activations in the backward pass: all of them, or those that are cheap to compute."""
    compiles: bool | None = None
    """Compile the decoder layers; None: where `wants_compiled` chooses it."""

    @classmethod
    def of(cls, config: PolicyConfig, device: torch.device) -> "ShardingSpec":
        """Build the options from a policy section."""
        asked = config.dtensor_cfg
        return cls(
            torch_dtype(config.precision),
            asked.cpu_offload,
            device,
            sequence_parallel=asked.sequence_parallel,
            custom_plan=asked.custom_parallel_plan,
            keep_experts=asked.moe_parallelizer.reshard_after_forward is False,
            keep_gathered=asked.keep_gathered or asked.pipeline_parallel_size > 1,
            recompute=asked.activation_checkpointing,
            compiles=asked.compile_layers,
        )


def enable_activation_checkpointing(hf: PreTrainedModel, *, selective: bool = False) -> None:
    """Recompute each decoder layer's activations in the backward pass (training mode only).

    Args:
        selective: keep the outputs that are expensive to recompute, those of matrix products and attention. A layer
            then keeps about as many bytes as its linear layers output, and its recomputation runs no matrix product.

    Raises:
        ConfigError: the architecture does not support it.
    """
    if not hf.supports_gradient_checkpointing:
        raise ConfigError(
            f"{type(hf).__name__} does not support activation checkpointing. "
            "Set policy.dtensor_cfg.activation_checkpointing=false."
        )
    kept: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, _keep_if_expensive)}
    hf.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False} | (kept if selective else {})
    )


def _keep_if_expensive(
    context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    expensive = operator.name() in KEPT_OPERATORS
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


@torch.no_grad()
def hold_in(model: ShardableModel, dtype: torch.dtype) -> None:
    """Round parameters, but not buffers, once to the dtype to which FSDP2 would round them in every pass."""
    kept = {id(parameter) for parameter in float32_parameters(model.hf, dtype).values()}
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)


def shard[ModelT: ShardableModel](model: ModelT, meshes: Meshes, spec: ShardingSpec) -> ModelT:
    """Divide layers, then shard decoder layers and root with FSDP2, in place.

    `lazy_weights.materialize` later allocates the parameters that are on the meta device.

    A model in float32 with one rank per stage is not changed: there is nothing to shard or to cast, and on one CPU
    core FSDP2's hooks cost a step of a 2-million-parameter model 18 % at 512 tokens (2048 tokens: nothing; a
    0.26-million-parameter model at 256 tokens: 54 %).

    Args:
        model: the wrapped model, parameters in float32 on the CPU or the meta device.
        meshes: the groups of ranks for each kind of division.
        spec: precision, offload and device.
    """
    if spec.recompute:
        enable_activation_checkpointing(model.hf, selective=spec.recompute == "selective")
    one_rank = meshes.layout.num_ranks == meshes.layout.pp
    if meshes.layout.tp > 1:
        _divide_layers(model, meshes, spec)
    layout = meshes.layout
    fits = spec.recompute != "selective" and layout.tp == layout.pp == layout.ep == 1
    if wants_compiled(spec.compiles, model.hf, spec.device, fits=fits):
        compile_layers(model.hf, spec.device)
    if one_rank and spec.compute_dtype == torch.float32 and not spec.cpu_offload:
        return model
    if meshes.layout.ep > 1:
        _share_experts(model.hf, meshes, spec)
    options: dict[str, Any] = {"mesh": meshes.fsdp, "offload_policy": _offload_policy(spec)}
    if spec.keep_gathered:
        options["reshard_after_forward"] = False
    kept = set(float32_parameters(model.hf, spec.compute_dtype).values())
    modules: list[nn.Module] = [*decoder_layers(model.hf), model]
    for module in modules:
        own = [parameter for parameter in module.parameters() if parameter in kept]
        fully_shard(module, mp_policy=_precision(spec, root=module is model), ignored_params=kept, **options)
        shard_in_float32(module, own, _offload_policy(spec))
        kept -= set(own)
    register_fsdp_forward_method(model, "body")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reshard_after_backward(not spec.keep_gathered, recurse=False)
    _move_buffers(model, spec.device)
    return model


def _divide_layers(model: ShardableModel, meshes: Meshes, spec: ShardingSpec) -> None:
    """Apply tensor parallelism, dividing whole experts among the ranks unless expert parallelism divides them."""
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
    """Apply expert parallelism, with the experts of a layer sharded separately from the rest of it."""
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
    """Free gathered parameters after a run of microbatches.

    FSDP2 keeps the root gathered after a pass without backward, and all parameters with `keep_gathered`. After a change
    of the shards (optimizer step, reference weights) the next forward would still use the old values.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _precision(spec: ShardingSpec, *, root: bool) -> MixedPrecisionPolicy:
    """Compute in bfloat16 or float16 and reduce gradients in float32, and cast only the root's outputs to float32."""
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
    """Move buffers (rotary frequencies) to the device, because FSDP with offload leaves them on the CPU."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device and not buffer.is_meta:
                setattr(module, name, buffer.to(device))
