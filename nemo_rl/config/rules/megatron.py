"""Check `policy.megatron_cfg` for any model: options that depend on each other, the schedule, and number formats.

The number formats are those of float8 training with Megatron Core, and those of engines.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.model.megatron import MEGATRON_LINEAR_LAYERS, MegatronConfig
from nemo_rl.config.schema.model.policy import PolicyConfig

_JOINED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
"""Matrices that vLLM joins into one matrix, which must therefore have the same number format."""


def _check_joined(key: str, texts: Sequence[str]) -> Findings:
    """Check that the texts match either all or none of the matrices that vLLM joins."""
    for group in _JOINED:
        taken = [name for name in group if any(text in name for text in texts)]
        if 0 < len(taken) < len(group):
            yield (
                f"{key}.quantization_ignored_layer_kws={list(texts)} takes {', '.join(taken)}, but vLLM joins "
                f"{', '.join(group)} into one matrix. Name all of them, or none."
            )


def check_engine_formats(policy: PolicyConfig, cluster: ClusterConfig) -> Findings:
    """Check the keys of float8 weights and of a float8 key-value cache against each other.

    Args:
        policy: the section `policy`. Without `generation`, there is nothing to check.
    """
    generation = policy.generation
    if generation is None:
        return
    key, wanted, backend = "policy.generation.vllm_cfg", generation.vllm_cfg, generation.backend
    if generation.engine.kv_cache_dtype != "auto" and backend != "vllm":
        yield (
            f"{key}.kv_cache_dtype={generation.engine.kv_cache_dtype} works with policy.generation.backend=vllm only, "
            f"got {backend}. Set it to auto."
        )
    if generation.engine.precision != "fp8":
        return
    yield from _check_joined(key, wanted.quantization_ignored_layer_kws)
    if wanted.is_mx and wanted.pow2_weight_scaling_factors:
        yield (
            f"{key}.pow2_weight_scaling_factors=true has no effect with {key}.is_mx=true, whose scales are powers of "
            "two anyway. Leave one of them out."
        )
    if not cluster.uses_gpu:
        return
    if backend != "vllm":
        yield (
            f"{key}.precision=fp8 on GPUs works with policy.generation.backend=vllm only, got {backend}. Set the "
            "precision to bfloat16."
        )
    fitting = ("bfloat16",) if wanted.is_mx else ("bfloat16", "float16")
    if policy.precision not in fitting:
        yield (
            f"{key}.precision=fp8 with policy.precision={policy.precision}: vLLM's float8 layers compute the rest in "
            f"{' or '.join(fitting)}. Set policy.precision=bfloat16."
        )
    if wanted.pow2_activation_scaling_factors and not (wanted.use_deep_gemm and wanted.pow2_weight_scaling_factors):
        yield (
            f"{key}.pow2_activation_scaling_factors=true: only DeepGEMM's kernels round scales of activations in vLLM, "
            "and they need such scales of weights. Set use_deep_gemm=true and pow2_weight_scaling_factors=true too, or "
            "leave it out."
        )


_TOKENS = {"tensorwise": 16, "delayed": 16, "mxfp8": 32, "blockwise": 128}
"""Number that must divide the tokens of a matrix product, by recipe. Dimensions of float8 products are multiples of 16,
and a recipe with one scale per block needs whole blocks."""


def fp8_row_multiple(policy: PolicyConfig) -> int:
    """Return the number that must divide the tokens of a rank's part of a row. It is 1 without float8."""
    megatron = policy.megatron_cfg
    return _TOKENS[megatron.fp8_cfg.fp8_recipe] if megatron.enabled and megatron.fp8_cfg.enabled else 1


def check_fp8_training(section: str, policy: PolicyConfig, cluster: ClusterConfig) -> Findings:
    """Check that training in float8 has devices and layers that can compute it.

    Args:
        section: name of the model's section.
        cluster: cluster on which the model is trained.
    """
    megatron = policy.megatron_cfg
    if not (megatron.enabled and megatron.fp8_cfg.enabled):
        return
    keys = f"{section}.megatron_cfg"
    if not cluster.uses_gpu:
        yield (
            f"{keys}.fp8_cfg.enabled=true needs NVIDIA GPUs and the package transformer-engine; on CPUs the layers "
            f"would silently compute in {section}.precision. Set {keys}.fp8_cfg.enabled=false, and keep fp8 for "
            "machines with GPUs."
        )
    if megatron.transformer_impl == "local":
        yield (
            f"{keys}.fp8_cfg.enabled=true needs the layers of Transformer Engine, and {keys}.transformer_impl=local "
            "uses PyTorch's. Leave transformer_impl out."
        )
    if policy.precision != "bfloat16":
        yield (
            f"{keys}.fp8_cfg.enabled=true with {section}.precision={policy.precision}: everything but the float8 "
            f"products is computed in bfloat16. Set {section}.precision=bfloat16."
        )


__all__ = ["check_engine_formats", "check_fp8_training", "fp8_row_multiple"]

_HOLDS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Linear layers of a Hugging Face model that each linear layer of Megatron Core combines."""


_OTHER_FAMILIES = {
    r"GLM-5": "glm_moe_dsa",
    r"Kimi-K2\.[5-9]": "kimi_k25",
    r"MiniMax-(M1|Text)": "minimax",
    r"gemma-4-": "gemma4",
}
"""Families that the backend does not train, by names of published models."""


def unknown_families(section: str, policy: PolicyConfig) -> Iterator[str]:
    """Yield a sentence if a published model belongs to a family that the backend will refuse.

    Args:
        section: name of the model's section.
    """
    name = policy.model_name
    if not policy.megatron_cfg.enabled or os.path.exists(name):
        return
    for pattern, family in _OTHER_FAMILIES.items():
        if re.search(pattern, name, re.IGNORECASE):
            yield (
                f"{section}.model_name={name} is of the family {family}, which {section}.megatron_cfg does not train "
                f"yet: the run will be refused when the model is read. {section}.dtensor_cfg.enabled=true with "
                f"{section}.megatron_cfg.enabled=false trains other families."
            )


def check_megatron(section: str, config: MegatronConfig) -> Findings:
    """Check that options that depend on each other are set together.

    Args:
        section: name of the model's section.
        config: its `megatron_cfg`.
    """
    keys = f"{section}.megatron_cfg"
    if config.moe_shared_expert_overlap and config.moe_token_dispatcher_type != "alltoall":
        yield (
            f"{keys}.moe_shared_expert_overlap=true needs {keys}.moe_token_dispatcher_type=alltoall, got "
            f"{config.moe_token_dispatcher_type}. Set one of the two."
        )
    if config.peft.enabled:
        yield from _check_adapters(keys, config)
    optimizer = config.optimizer
    if optimizer.is_muon:
        yield from _check_muon(keys, config)
    if optimizer.optimizer == "sgd" and optimizer.sgd_momentum > 0 and optimizer.use_distributed_optimizer:
        yield (
            f"{keys}.optimizer.sgd_momentum={optimizer.sgd_momentum:g} with use_distributed_optimizer=true cannot be "
            "saved: Megatron Core's distributed optimizer knows Adam's state only. Set "
            f"{keys}.optimizer.use_distributed_optimizer=false, or the momentum to 0."
        )


def _check_muon(keys: str, config: MegatronConfig) -> Findings:
    """Check that Muon gets whole matrices of the model itself."""
    given = f"{keys}.optimizer.optimizer={config.optimizer.optimizer}"
    if config.optimizer.use_distributed_optimizer:
        yield (
            f"{given} with use_distributed_optimizer=true: the distributed optimizer divides matrices among "
            f"data-parallel ranks, and Muon needs whole matrices. Set {keys}.optimizer.use_distributed_optimizer=false."
        )
    if config.peft.enabled:
        yield (
            f"{given} with {keys}.peft.enabled=true: Muon makes updates of whole matrices orthogonal; for the factors "
            f"of adapters no such rule is established. Set {keys}.optimizer.optimizer=adam, or train the whole model."
        )


def check_offloading(section: str, policy: PolicyConfig, cluster: ClusterConfig) -> Findings:
    """Check that Megatron Core can save and load an optimizer in host memory. The option has no effect on CPUs.

    Args:
        section: name of the model's section.
        cluster: cluster on which the model is trained.
    """
    optimizer = policy.megatron_cfg.optimizer
    if not (policy.megatron_cfg.enabled and optimizer.optimizer_cpu_offload and cluster.uses_gpu):
        return
    keys = f"{section}.megatron_cfg.optimizer"
    wanted = {
        f"{keys}.optimizer={optimizer.optimizer}": optimizer.optimizer == "adam",
        f"{keys}.use_distributed_optimizer=false": optimizer.use_distributed_optimizer,
        f"{section}.precision=float32": policy.precision != "float32",
    }
    for given in (given for given, fits in wanted.items() if not fits):
        yield (
            f"{keys}.optimizer_cpu_offload=true with {given}: Megatron Core's optimizer on two devices is saved and "
            "loaded only as a distributed Adam of bfloat16 weights. Change it, or leave optimizer_cpu_offload out."
        )


def _check_adapters(keys: str, config: MegatronConfig) -> Findings:
    """Check that the adapted layers exist in Megatron Core."""
    for key in ("target_modules", "exclude_modules"):
        for pattern in getattr(config.peft, key):
            last = pattern.rpartition(".")[2]
            if last in MEGATRON_LINEAR_LAYERS or not last.isidentifier():
                continue
            holder = next((ours for ours, theirs in _HOLDS.items() if last in theirs), None)
            meant = "" if holder is None else f" {last} is a part of {holder} there."
            yield (
                f"{keys}.peft.{key}: {pattern!r} is no linear layer of Megatron Core: there are "
                f"{', '.join(MEGATRON_LINEAR_LAYERS)}.{meant}"
            )


def check_adapters_of_experts(section: str, config: MegatronConfig, fields: Mapping[str, Any]) -> Findings:
    """Check options of a mixture of experts with adapters. They have no effect in a dense model.

    Args:
        section: name of the model's section.
        config: its `megatron_cfg`.
        fields: the model's fields of Megatron Core's `TransformerConfig`.
    """
    keys, rate = f"{section}.megatron_cfg", config.moe_router_bias_update_rate
    if not config.peft.enabled or "num_moe_experts" not in fields:
        return
    if config.moe_shared_expert_overlap:
        yield (
            f"{keys}.moe_shared_expert_overlap=true gives shared experts inputs that adapters cannot handle. "
            f"Set it to false with {keys}.peft.enabled=true."
        )
    asked = config.moe_router_enable_expert_bias
    has_bias = bool(fields.get("moe_router_enable_expert_bias")) if asked is None else asked
    if rate > 0 and has_bias:
        yield (
            f"{keys}.peft.enabled=true freezes everything but adapters, and {keys}.moe_router_bias_update_rate="
            f"{rate:g} moves biases of routers. Set the rate to 0."
        )


def check_megatron_schedule(section: str, config: MegatronConfig) -> Findings:
    """Check that the schedule rises to the learning rate, ends at or below it, and sets the necessary steps.

    Args:
        section: name of the model's section.
        config: its `megatron_cfg`.
    """
    optimizer, schedule = config.optimizer, config.scheduler
    keys, style = f"{section}.megatron_cfg", schedule.lr_decay_style
    end, warmup = schedule.lr_decay_iters, schedule.lr_warmup_iters
    others = {"optimizer.min_lr": optimizer.min_lr} if style != "constant" else {}
    others |= {"scheduler.lr_warmup_init": schedule.lr_warmup_init} if warmup else {}
    for key, rate in others.items():
        if rate > optimizer.lr:
            yield (
                f"{keys}.{key}={rate:g} is above {keys}.optimizer.lr={optimizer.lr:g}. Set it to at most "
                f"{optimizer.lr:g}, for example 0."
            )
    if end is None and style != "constant":
        yield (
            f"{keys}.scheduler.lr_decay_style={style} needs {keys}.scheduler.lr_decay_iters, the step at which the "
            "learning rate is optimizer.min_lr."
        )
    if end is not None and style != "constant" and warmup >= end:
        yield (
            f"{keys}.scheduler.lr_warmup_iters={warmup} is not below {keys}.scheduler.lr_decay_iters={end}. "
            f"Warm up for at most {end - 1} steps, or decay for more than {warmup}."
        )
    first, last = schedule.start_weight_decay, schedule.end_weight_decay
    rises = schedule.weight_decay_incr_style != "constant"
    if last < first or (first != last and not rises) or (rises and end is None):
        yield (
            f"{keys}.scheduler.start_weight_decay={first:g}, end_weight_decay={last:g} and weight_decay_incr_style="
            f"{schedule.weight_decay_incr_style} do not fit together: the weight decay is constant (two equal values), "
            "or rises until lr_decay_iters (linear, cosine)."
        )
