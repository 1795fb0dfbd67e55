"""Checks the keys of float8 formats: those of engines, and those of training with Megatron Core."""

from collections.abc import Sequence

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.model.policy import PolicyConfig

_JOINED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
"""Matrices that vLLM joins, so that they have one number format."""


def _check_joined(key: str, texts: Sequence[str]) -> Findings:
    """Check that texts of names take all matrices that are joined, or none of them."""
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
        policy: the section `policy`; without `generation` there is nothing to check.
        cluster: the machines.
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
"""Tokens of which a matrix product in each recipe takes a multiple: dimensions of float8 products are multiples of 16,
and whole blocks where a scale belongs to one."""


def fp8_row_multiple(policy: PolicyConfig) -> int:
    """Return the tokens of which each rank's part of a row has to be a multiple; 1 without training in float8."""
    megatron = policy.megatron_cfg
    return _TOKENS[megatron.fp8_cfg.fp8_recipe] if megatron.enabled and megatron.fp8_cfg.enabled else 1


def check_fp8_training(section: str, policy: PolicyConfig, cluster: ClusterConfig) -> Findings:
    """Check that training in float8 has devices and layers that can compute it.

    Args:
        section: name of the model's section.
        policy: the section.
        cluster: cluster where the model is trained.
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
