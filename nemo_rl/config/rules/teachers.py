"""Check the keys of teachers: those of distillation, and those whose scores give advantages in GRPO."""

from collections.abc import Mapping
from string import Formatter
from typing import Any

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.algorithms.distillation import DistillationLossConfig, TeacherConfig
from nemo_rl.config.schema.algorithms.grpo import BUILT_IN_ESTIMATORS, GRPOConfig
from nemo_rl.config.schema.algorithms.teachers import OnPolicyDistillationConfig, SelfDistillationConfig
from nemo_rl.config.schema.model.policy import PolicyConfig
from nemo_rl.utils.errors import did_you_mean


def check_teacher(place: str, teacher: TeacherConfig) -> Findings:
    """Check that a teacher is a language model without adapters. `check_second_models` makes the other checks."""
    for key in teacher.adapter_keys:
        yield f"{place}.{key}.enabled=true adds untrained adapters. Set it to false."
    if teacher.reward_model_cfg.enabled:
        yield f"{place}.reward_model_cfg.enabled=true makes a model that scores whole answers. Set it to false."


def check_teachers(
    given: OnPolicyDistillationConfig, teachers: Mapping[str, TeacherConfig], grpo: GRPOConfig, policy: PolicyConfig
) -> Findings:
    """Check that a GRPO run with teachers uses their scores, and that each name of a teacher belongs to one.

    Args:
        teachers: all teachers of the run that are models of the run, by name.
    """
    uses, place = grpo.adv_estimator.name == "opd", "on_policy_distillation"
    has_any = bool(teachers) or given.learns_from_itself or given.asks_endpoints
    if uses and not has_any:
        yield (
            "grpo.adv_estimator.name=opd needs teachers. Set on_policy_distillation.enabled=true and "
            "on_policy_distillation.teacher_model_by_agent_name, for example {math: <folder>}."
        )
    if has_any and grpo.adv_estimator.name in BUILT_IN_ESTIMATORS and not uses:
        yield (
            f"{place} or teachers names teachers, whose scores grpo.adv_estimator.name={grpo.adv_estimator.name} does "
            "not use. Set grpo.adv_estimator.name=opd, or leave the teachers out."
        )
    yield from _check_names_of_teachers(given, teachers)
    if given.learns_from_itself:
        yield from _check_self_distillation(given.self_distillation, {**teachers, **given.endpoints}, policy)
    for name, teacher in teachers.items():
        yield from check_teacher(f"teachers.{name}", teacher)
    if given.asks_endpoints and policy.generation is not None and policy.generation.temperature != 1:
        yield (
            f"{place}.endpoints: an endpoint scores at temperature 1, but policy.generation.temperature="
            f"{policy.generation.temperature:g}. Set it to 1, or use a model as the teacher."
        )
    if uses:
        yield from _check_scores_of_teachers(grpo, policy)


def _check_names_of_teachers(given: OnPolicyDistillationConfig, teachers: Mapping[str, TeacherConfig]) -> Findings:
    """Check that sections of teachers are switched on, and that names refer to a teacher."""
    place, known = "on_policy_distillation", given.routes(teachers)
    if not given.enabled:
        sections = {
            "teacher_model_by_agent_name": given.teacher_model_by_agent_name,
            "endpoints": given.endpoints,
            "self_distillation.enabled": given.self_distillation.enabled,
        }
        for key in (key for key, value in sections.items() if value):
            yield f"{place}.enabled=false, but {place}.{key} is set. Set {place}.enabled=true, or leave it out."
    for name in given.endpoints.keys() & teachers.keys():
        yield f"{place}.endpoints.{name} and teachers.{name} have one name. Rename one of them."
    alias, overrides = given.default_teacher_alias, given.non_colocated_teachers.teacher_overrides
    for key, names in (
        ("default_teacher_alias", [alias] if alias is not None else []),
        ("non_colocated_teachers.teacher_overrides", list(overrides)),
    ):
        for name in (name for name in names if name not in known):
            yield f"{place}.{key} names {name!r}, which is no teacher.{did_you_mean(name, known)}"


def _check_self_distillation(
    given: SelfDistillationConfig, teachers: Mapping[str, Any], policy: PolicyConfig
) -> Findings:
    """Check that the context is a template, and that the policy can score samples with other prompts."""
    key = "on_policy_distillation.self_distillation"
    if teachers:
        yield f"{key}.enabled=true makes the policy its own teacher. Leave the other teachers out, or set it to false."
    try:
        fields = [field for _, field, _, _ in Formatter().parse(given.context or "") if field is not None]
    except ValueError as error:
        yield f"{key}.context is no template: {error}. Write literal braces twice."
        return
    if not fields:
        yield (
            f"{key}.context={given.context!r} has no field of the row, so it tells the teacher nothing about it. Write "
            'for example "The answer is {ground_truth}."'
        )
    if policy.is_vlm:
        yield f"{key}.enabled=true renders prompts of text. Set policy.tokenizer.use_processor=false."
    if policy.router_replay.enabled:
        yield (
            f"{key}.enabled=true: the engine chose experts for the student's prompt, not for the teacher's. Set "
            "policy.router_replay.enabled=false."
        )


def _check_scores_of_teachers(grpo: GRPOConfig, policy: PolicyConfig) -> Findings:
    """Check that log-probabilities of teachers and policy can be compared, and that no key needs rewards in vain."""
    generation, alone = policy.generation, grpo.adv_estimator.reward_advantages == "none"
    key = "grpo.adv_estimator.name=opd"
    if generation is not None and (generation.top_p != 1 or generation.top_k not in (None, -1, 0)):
        yield (
            f"{key} compares log-probabilities of teacher and policy over the whole vocabulary, but the policy samples "
            f"from a part of it: policy.generation.top_p={generation.top_p:g} and top_k={generation.top_k}. Set "
            "top_p=1 and top_k=null."
        )
    if alone and grpo.use_dynamic_sampling:
        yield (
            f"grpo.use_dynamic_sampling=true keeps prompts whose rewards differ, but {key} with "
            "grpo.adv_estimator.reward_advantages=none trains without rewards. Set it to false."
        )


def check_distillation_loss(loss: DistillationLossConfig) -> Findings:
    """Check that the weight of the mixed loss keeps both of its parts."""
    if loss.mixed_kl_weight not in (0.0, 1.0):
        return
    alone = "forward" if loss.mixed_kl_weight == 1 else "reverse"
    if loss.kl_type == "mixed":
        yield (
            f"loss_fn.mixed_kl_weight={loss.mixed_kl_weight:g} leaves only the {alone} part of loss_fn.kl_type=mixed. "
            f"Set loss_fn.kl_type={alone}, or a weight between 0 and 1."
        )
    if loss.kl_type == "jensen_shannon":
        yield (
            f"loss_fn.mixed_kl_weight={loss.mixed_kl_weight:g} makes the divergence of loss_fn.kl_type=jensen_shannon "
            "always 0. Set a weight between 0 and 1."
        )
