"""Divide a model among ranks, and set up FSDP2, precision, compilation, activation checkpointing and offload.

Invariant: after backward each gradient is the SUM over ranks with different tokens, because losses are already divided
by global token counts. Parameters keep their names.

Compilation (`compile_layers`) turns chains of elementwise operations into one kernel. Each decoder layer is compiled
separately, before FSDP2 shards it, and its hooks (gathering of weights, activation checkpointing) stay outside of the
compiled code. Attention is not compiled, because it has its own kernels. All layers of a kind share one compilation for
microbatches of any size, so a model is compiled a few times per run. Invariant: scores and gradients equal those of
uncompiled layers up to rounding. Compiled code in bfloat16 rounds less often, because the intermediate values of a
chain stay in float32.

Some parameters of a model are used in float32, while FSDP2 rounds all others (`shard_in_float32`). FSDP2 has one
precision for all parameters that it gathers together, and a float32 parameter may be in the same module as rounded ones
(`A_log` and the projections of a mixer). Therefore a module gets a second FSDP2 group for its float32 parameters. Its
hooks gather both groups together. Invariant: gradients of the second group are reduced in float32, over the same ranks.
"""

import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
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
from nemo_rl.models.attention.registered import VARLEN_ATTENTION, varlen_attention
from nemo_rl.models.dtensor.expert_parallel import (
    dispatch_over_expert_ranks,
    divide_over_tensor_ranks,
    find_experts,
    require_experts,
    shard_experts,
)
from nemo_rl.models.dtensor.mesh import Meshes
from nemo_rl.models.dtensor.tensor_parallel import TensorParallel, divide_layers
from nemo_rl.models.huggingface.layers import decoder_layers, hidden_states
from nemo_rl.models.huggingface.load import float32_parameters, torch_dtype
from nemo_rl.models.huggingface.tensor_plans import plan_for
from nemo_rl.models.training.ordered_sums import OrderedSums
from nemo_rl.utils.errors import ConfigError

COMPILES_ON_GPUS = False
"""Whether layers are compiled on GPUs if the configuration key is null.

Set this to True when a GPU has passed two checks of `tools/gpu_check.py`: "compiled layers" (equal results) and
"compiled training step" (`times_as_fast` above 1 for short and long rows). No GPU has run these checks yet. Tests on
CPUs show that the results are equal.
"""
_KEY = "policy.dtensor_cfg.compile_layers"
_MOST_VARIANTS = 32
"""Number of compilations of one function after which torch runs it uncompiled. A layer is compiled with and without
gradients, for frozen and trained inputs, and for padded rows, packed rows and rows that share tokens."""
_CPU_COMPILERS = ("g++", "clang++")


def wants_compiled(asked: bool | None, hf: PreTrainedModel, device: torch.device, *, fits: bool) -> bool:
    """Return whether to compile the layers of a model.

    Args:
        asked: value of the configuration key; if None, `COMPILES_ON_GPUS` if model and settings allow compilation.
        fits: whether the other settings allow compilation.
    """
    if asked is not None:
        return asked
    return COMPILES_ON_GPUS and device.type != "cpu" and fits and not find_experts(hf) and has_triton()


def compile_layers(hf: PreTrainedModel, device: torch.device) -> None:
    """Compile the forward pass of every decoder layer, in place, so that the first pass runs the compiler.

    Args:
        hf: the model, whose layers are divided among tensor-parallel ranks but not yet sharded by FSDP2.

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
        module: module on which `fully_shard` was called with `ignored_params`, and which has other parameters too.
        parameters: the ignored parameters. Those that are not on the meta device are moved to the module's device.
        offload: the `offload_policy` of `fully_shard`.
    """
    _shard_separately(
        module, parameters, MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32), offload
    )


def _shard_separately(
    module: nn.Module, parameters: Iterable[nn.Parameter], policy: MixedPrecisionPolicy, offload: OffloadPolicy
) -> None:
    """Shard parameters in a group of their own, which the hooks of a module gather together with its first group."""
    chosen = list(parameters)
    if not chosen:
        return
    assert isinstance(module, FSDPModule), "fully_shard comes first"
    state: Any = module._get_fsdp_state()
    first = state._fsdp_param_groups[0]
    for parameter in chosen:
        if not parameter.is_meta:
            parameter.data = parameter.data.to(first.device)
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
"""Operators whose outputs selective checkpointing keeps: matrix products and every attention kernel that
`dtensor.attention` may call, but not matrix products of eager attention, which grow with the square of the length."""


class ShardableModel(nn.Module):
    """Base class of the model wrappers in `heads`, with the attributes that `shard` needs."""

    hf: PreTrainedModel
    """The wrapped Hugging Face model."""
    tp_group: dist.ProcessGroup | None = None
    """The ranks that divide each layer; None with one rank."""
    sequence_parallel: bool = False
    """Whether these ranks also divide the hidden states of a row between layers."""
    ordered_sums: OrderedSums | None = None
    """The sums of gradients over several ranks in the order of rows, with `invariant_gradients`."""

    def whole_rows(self, hidden: Tensor, *, partial_gradient: bool) -> Tensor:
        """Return `[b, T, D]` hidden states, gathered from `[b, T / tp, D]` with sequence parallelism.

        Args:
            hidden: the body's output.
            partial_gradient: whether each rank's backward pass yields only a part of the result's gradient.
        """
        if not self.sequence_parallel:
            return hidden
        return all_gather(hidden, 1, self.tp_group, partial_gradient=partial_gradient)

    def body(self, model_inputs: dict[str, Any]) -> Tensor:
        """Return the `[b, T, D]` hidden states after this rank's layers, which the next pipeline stage receives."""
        return hidden_states(self.hf, model_inputs)


@dataclass(frozen=True)
class ShardingSpec:
    """Options of `shard`."""

    compute_dtype: torch.dtype
    """Dtype of the forward and backward pass. Master weights stay float32, and the weights that
    `huggingface.load.stays_float32` selects are also used in float32."""
    cpu_offload: bool
    """Keep parameters, gradients and optimizer state in host memory."""
    device: torch.device
    """Device on which the rank computes."""
    sequence_parallel: bool = False
    """Divide norms and the residual stream along the sequence, among tensor-parallel ranks."""
    custom_plan: str | None = None
    """Dotted path of a tensor-parallel plan. If None, the plan of the model."""
    keep_experts: bool = False
    """Whether the experts of a layer stay gathered between forward and backward pass."""
    keep_gathered: bool = False
    """Gather parameters once for all microbatches, until `reshard`."""
    recompute: bool | Literal["selective"] = False
    """Recompute activations in the backward pass: all of them, or only those that are cheap to compute."""
    compiles: bool | None = None
    """Compile the decoder layers. If None, `wants_compiled` decides."""
    in_order: bool = False
    """Add gradients of several ranks in the order of rows."""

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
            in_order=config.invariant_gradients,
        )


def enable_activation_checkpointing(hf: PreTrainedModel, *, selective: bool = False) -> None:
    """Recompute each decoder layer's activations in the backward pass (training mode only).

    Args:
        selective: keep the outputs of matrix products and attention, which are expensive to recompute. A layer then
            keeps about as many bytes as its linear layers output, and does not recompute matrix products.

    Raises:
        ConfigError: the architecture does not support activation checkpointing.
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
    """Round the parameters once to `dtype`, so that FSDP2 need not round them in every pass. Buffers are kept."""
    kept = {id(parameter) for parameter in float32_parameters(model.hf, dtype).values()}
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)


def shard[ModelT: ShardableModel](model: ModelT, meshes: Meshes, spec: ShardingSpec) -> ModelT:
    """Divide layers, and shard decoder layers and the root module with FSDP2, in place.

    `lazy_weights.materialize` later allocates the parameters that are on the meta device.

    FSDP2 is not applied to a float32 model with one rank per stage, which needs no shards and no casts. On one CPU core
    the hooks of FSDP2 add 18 % to a step of a model with 2 million parameters at 512 tokens, and 54 % with 0.26 million
    parameters at 256 tokens; at 2048 tokens they add nothing.

    Args:
        model: the wrapped model, with float32 parameters on the CPU or the meta device.
        meshes: the groups of ranks for each kind of division.
        spec: precision, offload and device.
    """
    if spec.recompute:
        enable_activation_checkpointing(model.hf, selective=spec.recompute == "selective")
    one_rank = meshes.layout.num_ranks == meshes.layout.pp
    if adds_up_here(meshes, spec):
        spec = replace(spec, keep_gathered=True)
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
    shared = _parameters_of_several(modules[:-1]) - kept
    kept |= shared
    for module in modules:
        own = [parameter for parameter in module.parameters() if parameter in kept - shared]
        fully_shard(module, mp_policy=_precision(spec, root=module is model), ignored_params=kept, **options)
        shard_in_float32(module, own, _offload_policy(spec))
        kept -= set(own)
    of_several = [parameter for parameter in model.parameters() if parameter in shared]
    _shard_separately(model, of_several, _precision(spec, root=False), _offload_policy(spec))
    register_fsdp_forward_method(model, "body")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if meshes.layout.num_ranks > 1:  # FSDP2 would divide the gradients of one rank too, which takes time
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reshard_after_backward(not spec.keep_gathered, recurse=False)
    _move_buffers(model, spec.device)
    if spec.in_order and not one_rank:
        model.ordered_sums = OrderedSums(model)
    return model


def _parameters_of_several(layers: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters that several layers share. They are gathered with the root, for all of these layers."""
    uses = Counter(parameter for layer in layers for parameter in set(layer.parameters()))
    return {parameter for parameter, count in uses.items() if count > 1}


def _divide_layers(model: ShardableModel, meshes: Meshes, spec: ShardingSpec) -> None:
    """Apply tensor parallelism. Divide the experts of a layer among the ranks unless expert parallelism does this."""
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
    """Apply expert parallelism, and shard the experts of a layer separately from the rest of the layer."""
    for experts in require_experts(hf, meshes.layout.ep).values():
        dispatch_over_expert_ranks(experts, meshes.ep)
        shard_experts(
            experts,
            meshes.expert_fsdp,
            _precision(spec, root=False),
            _offload_policy(spec),
            reshard_after_forward=not (spec.keep_experts or spec.keep_gathered),
        )


def adds_up_here(meshes: Meshes, spec: ShardingSpec) -> bool:
    """Return whether a rank adds up the gradients of an update's microbatches before FSDP2 sees them.

    Where nothing is sharded, this and rounding the weights once for all microbatches save the copies of every
    microbatch, which are a sixth of the time with 135 million parameters. The sums have the same order and bits.
    """
    return meshes.layout.num_ranks == 1 and spec.device.type == "cpu" and not spec.cpu_offload


def finish_gradients(model: nn.Module, *, last: bool) -> None:
    """Choose whether the next backward pass hands its gradients to FSDP2, or keeps them for the `last` one."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)


def reshard(model: nn.Module) -> None:
    """Free gathered parameters after the microbatches of a call.

    FSDP2 keeps the root's parameters gathered after a pass without backward, and all parameters with `keep_gathered`.
    If the shards then changed (optimizer step, reference weights), the next forward would still use the old values.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _precision(spec: ShardingSpec, *, root: bool) -> MixedPrecisionPolicy:
    """Return a policy that reduces gradients in float32 and casts only the root's outputs to float32."""
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
    """Move buffers (rotary frequencies) to the device, because FSDP with offload keeps them on the CPU."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device and not buffer.is_meta:
                setattr(module, name, buffer.to(device))
