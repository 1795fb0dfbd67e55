"""Build Megatron Core's data parallelism, optimizer and schedule from `policy.megatron_cfg`.

Invariant: an update with a non-finite gradient sets the gradients to zero, and changes no weight and no optimizer
state. As in Megatron Core, biases and other vectors (norms) have no weight decay.
"""

import logging
import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import GRAD_NORM_GROUP_ATTR, MTP_GRAD_NORM_GROUP, MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging
from megatron.core.transformer.moe.router import TopKRouter

from nemo_rl.config.schema.model.megatron import MegatronConfig, MegatronSchedulerConfig
from nemo_rl.models.megatron import parallel
from nemo_rl.models.megatron.scoring import ScalarHead
from nemo_rl.models.training.tensor_checks import not_finite
from nemo_rl.models.training.torch_backend import HostMemory, move_state
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)


def with_gradients(chunks: Sequence[Any], section: MegatronConfig) -> list[DistributedDataParallel]:
    """Wrap the chunks with gradient buffers, which are summed over data-parallel and context-parallel ranks.

    Args:
        chunks: GPTModels after `schedule.prepare`, with weights.
        section: `policy.megatron_cfg`.
    """
    wanted = section.distributed_data_parallel_config
    distributed = bool(section.optimizer.use_distributed_optimizer)
    overlaps = bool(wanted.overlap_grad_reduce)
    wrapped = [
        DistributedDataParallel(
            config=chunk.config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=wanted.grad_reduce_in_fp32,
                overlap_grad_reduce=overlaps,
                overlap_param_gather=bool(wanted.overlap_param_gather) and overlaps and distributed,
                use_distributed_optimizer=distributed,
            ),
            module=chunk,
            disable_bucketing=index > 0,
        )
        for index, chunk in enumerate(chunks)
    ]
    if overlaps:
        no_sync = [chunk.no_sync for chunk in wrapped]
        for chunk in chunks:
            chunk.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], section: MegatronConfig, *, precision: torch.dtype
) -> MegatronOptimizer:
    """Build the optimizer from `policy.megatron_cfg.optimizer`.

    Args:
        chunks: result of `with_gradients`.
        section: `policy.megatron_cfg`.
        precision: dtype of the weights in the layers. The optimizer keeps float32 copies of 16-bit weights.
    """
    wanted = section.optimizer
    on_gpu, distributed = is_on_gpu(chunks), chunks[0].ddp_config.use_distributed_optimizer
    offloads = on_gpu and wanted.optimizer_cpu_offload
    if wanted.is_muon:
        _leave_to_adam(chunks)
    config = OptimizerConfig(
        optimizer="muon" if wanted.is_muon else wanted.optimizer,
        **wanted.model_dump(include={name for name in type(wanted).model_fields if name.startswith("muon_")}),
        lr=wanted.lr,
        min_lr=wanted.min_lr,
        weight_decay=wanted.weight_decay,
        adam_beta1=wanted.adam_beta1,
        adam_beta2=wanted.adam_beta2,
        adam_eps=wanted.adam_eps,
        sgd_momentum=wanted.sgd_momentum,
        optimizer_cpu_offload=offloads,
        optimizer_offload_fraction=wanted.optimizer_offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=wanted.overlap_cpu_optimizer_d2h_h2d,
        bf16=precision is torch.bfloat16,
        fp16=precision is torch.float16,
        params_dtype=precision,
        use_distributed_optimizer=distributed,
        # # If the host updates a part of the weights, Megatron Core can load a checkpoint only in this mode.
        use_precision_aware_optimizer=offloads or (on_gpu and distributed and _holds_its_state(section, precision)),
        store_param_remainders=False,
        clip_grad=wanted.clip_grad or 0.0,
    )
    with parallel.cuda_names():
        optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
    for member in parts_of(optimizer):
        if isinstance(member, DistributedOptimizer):
            _number_weights(member)
    return optimizer


def _leave_to_adam(chunks: Sequence[DistributedDataParallel]) -> None:
    """Mark routers and scalar heads as parameters that Adam updates, as Megatron Core marks embeddings and heads."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, TopKRouter | ScalarHead):
            weights: list[Any] = list(module.parameters(recurse=False))
            for weight in weights:
                weight.is_embedding_or_output_parameter = True


def _number_weights(member: DistributedOptimizer) -> None:
    """Number the weights of each group as in torch's optimizer.

    Megatron Core puts float32 weights before 16-bit weights in the groups of torch's optimizer, but numbers all weights
    in the order of the model. A checkpoint of a group with both would contain the states of other weights.
    """
    groups = zip(member.model_fp32_groups, member.model_float16_groups, strict=True)
    for group, (full, half) in enumerate(groups):
        for number, parameter in enumerate([*full, *half]):
            member.model_param_group_index_map[parameter] = (group, number)


def is_on_gpu(chunks: Sequence[Any]) -> bool:
    """Return whether a rank's weights are in the memory of a GPU."""
    return next(chunks[0].parameters()).is_cuda


def _holds_its_state(section: MegatronConfig, precision: torch.dtype) -> bool:
    """Return whether to use Transformer Engine's Adam, which stores float32 copies of 16-bit weights itself.

    Its option `store_param_remainders` would store only the 16 bits of each float32 weight that the bfloat16 weight
    lacks. This would save 2 bytes per weight, divided by the data-parallel ranks. The option is not used, because
    Megatron Core 0.19 saves these bits as if they were the weight (`DistributedOptimizer.get_parameter_state_dp_zero`).
    """
    wanted = section.optimizer
    asked = wanted.use_precision_aware_optimizer and wanted.optimizer == "adam" and precision is not torch.float32
    return asked and find_spec("transformer_engine") is not None


def build_scheduler(optimizer: MegatronOptimizer, section: MegatronConfig) -> OptimizerParamScheduler:
    """Build the schedule of learning rate and weight decay, which advances once per training step.

    Args:
        section: `policy.megatron_cfg`.

    Raises:
        ConfigError: the numbers of the schedule contradict each other.
    """
    rates, wanted = section.optimizer, section.scheduler
    falls, warmup = wanted.lr_decay_style != "constant", wanted.lr_warmup_iters
    last = _last_step(wanted)
    try:
        return OptimizerParamScheduler(
            optimizer,
            init_lr=wanted.lr_warmup_init if warmup else 0.0,
            max_lr=rates.lr,
            min_lr=rates.min_lr if falls else 0.0,
            lr_warmup_steps=warmup,
            lr_decay_steps=last,
            lr_decay_style=wanted.lr_decay_style,
            start_wd=wanted.start_weight_decay,
            end_wd=wanted.end_weight_decay,
            wd_incr_steps=last,
            wd_incr_style=wanted.weight_decay_incr_style,
        )
    except AssertionError as error:
        raise ConfigError(
            f"policy.megatron_cfg.scheduler contradicts itself or optimizer.lr={rates.lr}, min_lr={rates.min_lr}: "
            f"{wanted}. Wanted are lr_warmup_init <= lr, min_lr <= lr, lr_warmup_iters < lr_decay_iters, and "
            "start_weight_decay <= end_weight_decay, equal with weight_decay_incr_style=constant."
        ) from error


def _last_step(wanted: MegatronSchedulerConfig) -> int:
    """Return the step at which learning rate and weight decay reach their final values."""
    if wanted.lr_decay_style == wanted.weight_decay_incr_style == "constant":
        return max(wanted.lr_decay_iters or 0, wanted.lr_warmup_iters + 1)  # the value has no effect
    if wanted.lr_decay_iters is None:
        raise ConfigError(
            f"policy.megatron_cfg.scheduler has lr_decay_style={wanted.lr_decay_style} and weight_decay_incr_style="
            f"{wanted.weight_decay_incr_style}: set lr_decay_iters to the steps that they take."
        )
    return int(wanted.lr_decay_iters)


def clip_and_step(
    optimizer: MegatronOptimizer, chunks: Sequence[DistributedDataParallel]
) -> tuple[float, bool, list[str]]:
    """Clip gradients, update the weights, and set gradients to zero. The call is collective.

    The parts of Megatron Core's `step` are called separately, because `step` updates even if the norm is not finite.

    Returns:
        The norm before clipping, equal on all ranks, whether the update was made, and the names of this rank's
        gradients that are not finite if it was not made.
    """
    with parallel.cuda_names():
        overflow = optimizer.prepare_grads()
        norm, mtp_norm = float(optimizer.get_grad_norm()), _norm_of_mtp(optimizer)
        finite = math.isfinite(norm + mtp_norm) and math.isfinite(learning_rate(optimizer)) and not overflow
        if finite:
            _clip(optimizer, norm, mtp_norm)
            optimizer.step_with_ready_grads()
        dropped_for = [] if finite else not_finite(_gradients(chunks))
        zero_gradients(optimizer, chunks)
    return norm, finite, dropped_for


def _gradients(chunks: Sequence[DistributedDataParallel]) -> dict[str, torch.Tensor]:
    named = ((name, weight) for chunk in chunks for name, weight in chunk.module.named_parameters())
    gradients = {name: getattr(weight, "main_grad", None) for name, weight in named}
    return {f"{name}.grad": gradient for name, gradient in gradients.items() if gradient is not None}


def _norm_of_mtp(optimizer: MegatronOptimizer) -> float:
    """Return the gradient norm of detached multi-token-prediction layers, or 0 without them. The call is collective."""
    squares = 0.0
    for part in parts_of(optimizer):
        if part.has_grad_norm_group(MTP_GRAD_NORM_GROUP):
            group = part.get_grad_stats_parallel_group()
            squares += float(get_grad_norm_fp32(part.get_grads_for_grad_norm(MTP_GRAD_NORM_GROUP), 2, group)) ** 2
    return math.sqrt(squares)


def _clip(optimizer: MegatronOptimizer, norm: float, mtp_norm: float) -> None:
    """Clip the gradients. Gradients of detached multi-token-prediction layers are clipped by their own norm."""
    for part in parts_of(optimizer):
        if part.config.clip_grad <= 0:
            continue
        decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        detached = [weight for weight in part.get_parameters() if hasattr(weight, GRAD_NORM_GROUP_ATTR)]
        others = [weight for weight in part.get_parameters() if not hasattr(weight, GRAD_NORM_GROUP_ATTR)]
        for parameters, total in ((others, norm), (detached, mtp_norm)):
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, total, use_decoupled_grad=decoupled)


def parts_of(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizer of experts and that of other parameters. One without parameters on this rank is left out."""
    parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


@torch.no_grad()
def move_part(part: Any, memory: HostMemory, device: torch.device, *, to_host: bool) -> None:
    """Move an optimizer's moments and float32 weights to host memory or back to the device.

    Args:
        part: one of `parts_of`. State of parameters that are updated on the host (`optimizer_cpu_offload`) stays there.
        memory: host memory for only this part.
        to_host: whether to move to the host or, if False, back.
    """
    inner, kept = part.optimizer, _float32_weights(part)
    if isinstance(inner, HybridDeviceOptimizer):
        if inner.gpu_optimizer is None:
            return
        inner = inner.gpu_optimizer
        kept = [weight for group in inner.param_groups for weight in group["params"]]
    move_state(inner, memory, device, to_host=to_host)
    for index, weight in enumerate(kept):
        if to_host:
            weight.data = memory.store(f"float32.{index}", weight.data)
        else:
            weight.data = weight.data.to(device, non_blocking=True, copy=True)


def _float32_weights(part: Any) -> list[torch.Tensor]:
    """Return the float32 copies that Megatron Core's optimizer keeps of 16-bit weights."""
    groups = getattr(part, "shard_fp32_from_float16_groups", None) or getattr(part, "fp32_from_float16_groups", [])
    return [weight for group in groups for weight in group if weight is not None]  # None if torch's optimizer has it


def zero_gradients(optimizer: MegatronOptimizer, chunks: Sequence[DistributedDataParallel]) -> None:
    """Set all gradients to zero for the next update."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def learning_rate(optimizer: MegatronOptimizer) -> float:
    """Return the current learning rate of parameters without a rate of their own."""
    return float(get_canonical_lr_for_logging(optimizer.param_groups) or 0.0)


def complete_weights(chunks: Sequence[Any]) -> None:
    """Finish the gathering of weights, so that they can be read. Updates leave this to the next forward pass."""
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            for bucket_group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
                bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)
