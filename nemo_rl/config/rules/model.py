"""Checks the section of any single model: its backend, the keys that training needs, its microbatches.

Runs apply these rules under the name of the section; workers apply them again, because they can be built without a run.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.rules.megatron import check_megatron, check_megatron_schedule
from nemo_rl.config.schema.model.policy import PolicyConfig


def check_backend(section: str, policy: PolicyConfig) -> Findings:
    """Check that exactly one backend is enabled in `section`."""
    own, sections = policy.training_backend, ("dtensor_cfg", "megatron_cfg")
    asked = [f"{section}.{name}.enabled=true" for name in sections if getattr(policy, name).enabled]
    asked += [f"{section}.training_backend.name={own.name}"] if own is not None else []
    if not asked:
        yield (
            f"{section}.dtensor_cfg.enabled=false leaves no training backend. Set it or {section}.megatron_cfg.enabled "
            f"to true, or name your own backend: {section}.training_backend.name."
        )
    if len(asked) > 1:
        others = [
            f"set {each.replace('true', 'false')}" if each.endswith("true") else f"leave {section}.training_backend out"
            for each in asked
        ]
        yield (
            f"{' and '.join(asked)} name {'two' if len(asked) == 2 else 'three'} training backends. Keep one: "
            f"{' or '.join(others)}."
        )
    if policy.megatron_cfg.enabled:
        yield from check_megatron(section, policy.megatron_cfg)
    if policy.router_replay.enabled:
        yield from _check_router_replay(section, policy)
    if policy.megatron_cfg.enabled and policy.dtensor_cfg.lora_cfg.enabled:
        yield (
            f"{section}.dtensor_cfg.lora_cfg.enabled=true belongs to {section}.dtensor_cfg. Set it to false; adapters "
            f"of Megatron Core are enabled by {section}.megatron_cfg.peft.enabled=true."
        )


def _check_router_replay(section: str, policy: PolicyConfig) -> Findings:
    """Check that the model samples with engines, and that its backend can replay their choice of experts."""
    key, advice = f"{section}.router_replay.enabled=true", f"Set {section}.router_replay.enabled=false."
    if section != "policy":
        yield f"{key}: engines choose the experts of the policy's tokens, not those of the {section}. {advice}"
    elif policy.generation is None:
        yield f"{key} needs engines whose choice of experts is replayed, but this run samples no answers. {advice}"
    if policy.training_backend is not None:
        yield f"{key} is built for dtensor_cfg and megatron_cfg, not for {section}.training_backend. {advice}"
    elif policy.megatron_cfg.enabled:
        stages, recomputes = (
            policy.megatron_cfg.pipeline_model_parallel_size,
            policy.megatron_cfg.activation_checkpointing,
        )
        if stages > 1 and recomputes:
            yield (
                f"{key} with {section}.megatron_cfg.pipeline_model_parallel_size={stages} needs "
                f"{section}.megatron_cfg.activation_checkpointing=false: a layer that is computed again while other "
                "microbatches are under way would get their experts. Set one of the two, or use one stage."
            )
        if policy.megatron_cfg.model_overrides.get("moe_router_fusion"):
            yield (
                f"{key} cannot replace the choice of a fused kernel. Remove moe_router_fusion from "
                f"{section}.megatron_cfg.model_overrides."
            )


def check_trainable(policy: PolicyConfig, section: str = "policy") -> Findings:
    """A model that is trained has an optimizer, and computes in a format that holds small gradients."""
    if policy.megatron_cfg.enabled:
        yield from check_megatron_schedule(section, policy.megatron_cfg)
    elif policy.optimizer is None:
        yield (
            f"{section}.optimizer is null, but the {section} is trained. Name an optimizer, for example "
            "torch.optim.AdamW."
        )
    yield from _check_finite(policy, section)
    if policy.precision == "float16":
        yield (
            f"{section}.precision=float16 loses gradients below 6e-8, and there is no loss scaling that would save "
            "them. Use bfloat16, which has the range of float32, or float32."
        )


def _check_finite(policy: PolicyConfig, section: str) -> Findings:
    """Arguments of optimizer and schedule, which have no keys of their own, are finite numbers."""
    written = policy.model_dump(include={"optimizer", "scheduler"})
    for key, value in _numbers(written, section):
        if not math.isfinite(value):
            yield f"{key}={value} is not finite, and would make every weight infinite or NaN. Write a finite number."


def _numbers(value: Any, key: str) -> Iterator[tuple[str, float]]:
    """Yield all floats at and below a value, each with its dotted key."""
    if isinstance(value, float):
        yield key, value
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, below in items:
        yield from _numbers(below, f"{key}.{name}")


def check_one_layout(section: str, model: PolicyConfig) -> Findings:
    """Check that packing and dynamic batching are not both on.

    Args:
        section: name of the section.
        model: the section.
    """
    packing, dynamic = model.sequence_packing, model.dynamic_batching
    if packing.enabled and dynamic.enabled:
        yield (
            f"{section}.sequence_packing.enabled=true and {section}.dynamic_batching.enabled=true exclude each "
            f"other. Switch one off, for example {section}.sequence_packing.enabled=false."
        )
