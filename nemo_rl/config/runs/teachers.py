"""Make the section of each teacher of a GRPO run from `on_policy_distillation`.

A teacher computes as the policy does: it has the policy's backend, lengths and batch sizes, and on the policy's devices
also its parallel sizes. Invariant: a teacher has no optimizer and no adapters, and scores at the sampler's temperature.
"""

from collections.abc import Mapping
from typing import Any

from nemo_rl.config.schema.algorithms.distillation import TeacherConfig
from nemo_rl.config.schema.algorithms.teachers import OnPolicyDistillationConfig, TeacherLayoutConfig
from nemo_rl.config.schema.model.policy import PolicyConfig

_OF_TRAINING = ("optimizer", "scheduler", "generation", "draft", "router_replay")


def teacher_sections(
    given: OnPolicyDistillationConfig, own: Mapping[str, TeacherConfig], policy: PolicyConfig
) -> dict[str, TeacherConfig]:
    """Return the sections of all teachers by name: those in `own`, and one for each model of `given`."""
    sections = dict(own)
    if given.enabled:
        for name, teacher in given.routes(own).items():
            if teacher == name and name not in sections and name not in given.endpoints:
                sections[name] = _section(given, name, policy)
    return {name: at_temperature(section, policy) for name, section in sections.items()}


def at_temperature(section: TeacherConfig, policy: PolicyConfig) -> TeacherConfig:
    """Return the section of a teacher whose log-probabilities are those at the policy's sampling temperature."""
    if policy.generation is None:
        return section
    sampler = {"temperature": policy.generation.temperature, "max_new_tokens": policy.generation.max_new_tokens}
    return TeacherConfig.build(**{**section.model_dump(), "generation": sampler})


def _section(given: OnPolicyDistillationConfig, name: str, policy: PolicyConfig) -> TeacherConfig:
    model = given.teacher_model_by_agent_name[name]
    values = policy.model_dump(exclude=set(_OF_TRAINING))
    values |= {"model_name": model, "trust_remote_code": False}
    values["weight"] = given.teacher_weights.get(name, 1.0)
    values["tokenizer"] = {**values["tokenizer"], "name": model}
    values["dtensor_cfg"]["lora_cfg"]["enabled"] = False
    values["megatron_cfg"]["peft"]["enabled"] = False
    separate = given.non_colocated_teachers
    if separate.enabled:
        _set_layout(values, separate.layout_of(name), policy)
    return TeacherConfig.build(**values)


def _set_layout(values: dict[str, Any], layout: TeacherLayoutConfig, policy: PolicyConfig) -> None:
    """Change devices, parallel sizes and precision in the values of a section."""
    resources = {key: getattr(layout, key) for key in ("num_nodes", "gpus_per_node", "ranks_per_node")}
    values["colocated"] = {"enabled": False, "resources": resources}
    values["logprob_batch_size"] = layout.micro_batch_size
    values["precision"] = layout.full_precision_name or values["precision"]
    keys, backend = policy.backend_section.size_keys, values[policy.backend_key]
    backend |= {keys[axis]: layout.size(axis) for axis in layout.size_keys if axis in keys}
    if policy.backend_key == "megatron_cfg":
        backend |= layout.megatron_cfg_overrides or {}
