"""Check what `policy.zero_mismatch` needs: an engine with the trainer's layers, and undivided matrix products."""

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.model.policy import PolicyConfig

_KEY = "policy.zero_mismatch=true"
_ENGINES = {"hf": "dtensor_cfg", "megatron": "megatron_cfg"}
"""Engines that compute the layers of a training backend, and the sections of these backends."""


def check_zero_mismatch(policy: PolicyConfig, cluster: ClusterConfig) -> Findings:
    """Refuse settings with which engine and trainer would compute other bits."""
    if not policy.zero_mismatch or policy.generation is None:
        return
    generation, engine = policy.generation, policy.generation.engine
    if cluster.uses_gpu:
        yield f"{_KEY} computes on CPUs only so far, and cluster.device={cluster.device}. Set it to false."
    backend = _ENGINES.get(generation.backend)
    if backend is None:
        yield (
            f"{_KEY} needs an engine with the layers of the trainer, and policy.generation.backend="
            f"{generation.backend} has kernels of its own. Set it to hf (with dtensor_cfg) or megatron (with "
            "megatron_cfg)."
        )
    elif backend != policy.backend_key:
        yield (
            f"{_KEY} with policy.generation.backend={generation.backend} needs a policy of policy.{backend}, and the "
            f"policy is one of policy.{policy.backend_key}. Change one of them."
        )
    if engine.precision not in ("auto", policy.precision):
        yield (
            f"{_KEY} needs one number format, and policy.precision={policy.precision} differs from "
            f"policy.generation.engine.precision={engine.precision}. Set the latter to auto."
        )
    for key in policy.adapter_keys:
        yield f"{_KEY}: engines get merged adapters, which round otherwise. Set policy.{key}.enabled=false."
    if policy.is_vlm:
        yield f"{_KEY} is for rows of text, and policy.is_vlm=true. Set it to false."
    if policy.dtensor_cfg.enabled and policy.dtensor_cfg.compile_layers:
        yield f"{_KEY}: compiled layers round less often. Set policy.dtensor_cfg.compile_layers=false."
    yield from _check_division(policy)


def _check_division(policy: PolicyConfig) -> Findings:
    section, key = policy.backend_section, policy.backend_key
    sizes = {
        f"policy.{key}.{name}": getattr(section, name, 1)
        for name in (
            *("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size", "expert_parallel_size"),
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
        )
    }
    engine = policy.sampling.engine
    names = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size")
    sizes |= {f"policy.generation.engine.{name}": getattr(engine, name) for name in names}
    for name, size in sizes.items():
        if size and size > 1:
            yield f"{_KEY} is proven for undivided models, and {name}={size}. Set it to 1; data parallelism is allowed."
