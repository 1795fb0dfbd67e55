"""Check a policy that reads images: which backends, meshes, engines and algorithms process them.

Combinations that are not proven equal to transformers are refused by name.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.rules.topology import Role
from nemo_rl.config.schema.model.policy import PolicyConfig

_OWN_ARGUMENTS = ("mm_device_do_normalize", "mm_processor_kwargs", "language_model_only", "speculative_config")
"""Arguments of vLLM that would change images between engine and trainer, or that are not proven with images."""
_BACKENDS = ("vllm", "hf")


def check_images(models: Mapping[str, Role], *, algorithm_reads_images: bool) -> Findings:
    """Check all models of a run.

    Args:
        algorithm_reads_images: Whether the algorithm's rows may have images.
    """
    for name, role in models.items():
        policy = role.section
        if policy.is_vlm != policy.tokenizer.use_processor:
            yield (
                f"{name}.is_vlm={str(policy.is_vlm).lower()}, but {name}.tokenizer.use_processor="
                f"{str(policy.tokenizer.use_processor).lower()}. Set both to the same value; is_vlm follows "
                "use_processor if it is left out."
            )
        if not policy.is_vlm:
            continue
        if name != "policy":
            yield f"{name}.is_vlm=true: only the policy reads images. Set {name}.tokenizer.use_processor=false."
        elif not algorithm_reads_images:
            yield "policy.is_vlm=true: images are read with GRPO, SFT and DPO. Use one of them, or rows of text."
        if name == "policy":
            yield from _check_backend(policy)
            yield from _check_engine(policy)


def _check_backend(policy: PolicyConfig) -> Findings:
    section = policy.backend_key
    if policy.megatron_cfg.enabled:
        yield (
            "policy.is_vlm=true: Megatron Core gets no images. Set policy.megatron_cfg.enabled=false and "
            "policy.dtensor_cfg.enabled=true."
        )
        return
    for size, key in _divided(policy):
        yield f"policy.{section}.{key}={size}: rows with images are divided over data-parallel ranks only. Set it to 1."
    if policy.dtensor_cfg.sequence_parallel:
        yield f"policy.{section}.sequence_parallel=true: images are not divided. Set it to false."
    if policy.reward_model_cfg.enabled:
        yield "policy.is_vlm=true: a reward model reads text alone. Set policy.tokenizer.use_processor=false."


def _divided(policy: PolicyConfig) -> Iterator[tuple[int, str]]:
    section: Any = policy.backend_section
    for axis in ("tensor", "pipeline", "context", "expert"):
        size = getattr(section, key := f"{axis}_parallel_size", 1)
        if size > 1:
            yield size, key


def _check_engine(policy: PolicyConfig) -> Findings:
    generation = policy.generation
    if generation is None:
        return
    place = "policy.generation"
    if generation.backend in ("megatron", "sglang"):
        yield f"{place}.backend={generation.backend} gets no images. Set it to {' or '.join(_BACKENDS)}."
    if generation.engine.precision == "fp8":
        yield f"{place}.vllm_cfg.precision=fp8 is not proven for modules that read images. Set it to bfloat16."
    for key in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
        size = getattr(generation.engine, key)
        if size > 1:
            yield f"{place}.vllm_cfg.{key}={size} is not proven with images. Set it to 1."
    for key in _OWN_ARGUMENTS:
        if generation.vllm_kwargs.get(key):
            yield f"{place}.vllm_kwargs.{key}: with images, the adapter decides it. Remove it."
    if policy.draft.enabled:
        yield "policy.draft.enabled=true: speculation is not proven with images. Set it to false."
    frozen = policy.dtensor_cfg.automodel_kwargs.freeze_config
    trained = not (frozen.freeze_vision_tower and frozen.freeze_vision_projection)
    if policy.mixes_weights and trained:
        yield (
            f"{place}.weight_sync.recompute_kv_cache=false keeps features of images from older weights. Set it to "
            "true, or freeze the tower and the projection (policy.dtensor_cfg.automodel_kwargs.freeze_config)."
        )
