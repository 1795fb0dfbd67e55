"""Checks that the engines have the number formats that the configuration asks for.

`models.generation.vllm.float8.check` checks the model, which it reads.
"""

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.model.policy import PolicyConfig


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
