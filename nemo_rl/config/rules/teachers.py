"""Check the keys of teachers: which samples they score, what their scores are used for, and what cannot be compared.

The checks of every model besides the policy are in `rules.models`.
"""

from collections.abc import Iterable, Mapping
from string import Formatter
from typing import Any

from nemo_rl.config.rules.broken_rules import Findings, check_named_parts
from nemo_rl.config.rules.rewards import check_thinking_tags
from nemo_rl.config.schema.agents import NEMO_GYM
from nemo_rl.config.schema.algorithms.distillation import DistillationLossConfig, TeacherConfig
from nemo_rl.config.schema.algorithms.grpo import BUILT_IN_ESTIMATORS, GRPOConfig
from nemo_rl.config.schema.algorithms.teachers import (
    OnPolicyDistillationConfig,
    SelfDistillationConfig,
    TokenWeightsConfig,
)
from nemo_rl.config.schema.model.policy import PolicyConfig
from nemo_rl.config.schema.named_part import NamedPartConfig
from nemo_rl.utils.errors import did_you_mean


def check_teacher(place: str, teacher: TeacherConfig) -> Findings:
    """Check that a teacher is a language model without adapters. `check_second_models` makes the other checks."""
    for key in teacher.adapter_keys:
        yield f"{place}.{key}.enabled=true adds untrained adapters. Set it to false."
    if teacher.reward_model_cfg.enabled:
        yield f"{place}.reward_model_cfg.enabled=true makes a model that scores whole answers. Set it to false."
    yield from _check_token_weights(f"{place}.token_weights", teacher.token_weights)


def _check_token_weights(place: str, given: TokenWeightsConfig) -> Findings:
    """Check that some tokens have a factor above 0, and that tags can be told apart."""
    if given.thinking == given.answer == 0:
        yield f"{place}.thinking and {place}.answer are 0, so nothing is learned. Raise one of them."
    yield from check_thinking_tags(f"{place}.thinking_tags", given.thinking_tags)
    yield from check_named_parts({place: given})


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
        if teacher.projection_matrix_path is not None:
            yield f"teachers.{name}.projection_matrix_path is for distillation. Leave it out: GRPO compares texts."
    if given.asks_endpoints and policy.generation is not None and policy.generation.temperature != 1:
        yield (
            f"{place}.endpoints: an endpoint scores at temperature 1, but policy.generation.temperature="
            f"{policy.generation.temperature:g}. Set it to 1, or use a model as the teacher."
        )
    if uses:
        yield from _check_scores_of_teachers(grpo, policy)


def check_routes(
    given: OnPolicyDistillationConfig, teachers: Mapping[str, TeacherConfig], used: Iterable[str | None]
) -> Findings:
    """Check that samples of each environment have a teacher. Samples of NeMo Gym may have that of their agent.

    Args:
        used: names of environments that data has.
    """
    known = given.routes(teachers)
    if not known or (given.default_teacher_alias is not None and not given.strict_agent_name_match):
        return
    for name in sorted({name for name in used if name} - known.keys() - {NEMO_GYM}):
        yield (
            f"on_policy_distillation has no teacher for env_name={name} of the data; there are teachers for "
            f"{', '.join(known)}. Add it to on_policy_distillation.teacher_model_by_agent_name, or set "
            "on_policy_distillation.default_teacher_alias (and strict_agent_name_match=false)."
        )


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
    for name, weight in given.teacher_weights.items():
        own = known.get(name)
        if own == name and (name not in teachers or teachers[name].weight == weight):
            continue
        where = f"Set teachers.{own}.weight." if own in teachers else f"There are: {', '.join(known)}."
        yield f"{place}.teacher_weights.{name}={weight:g} is for no teacher of this name without a section. {where}"
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
    yield from _check_token_weights(f"{key}.token_weights", given.token_weights)
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


def check_distillation_loss(loss: DistillationLossConfig, place: str = "loss_fn") -> Findings:
    """Check that the weight of the mixed loss keeps both of its parts."""
    if loss.mixed_kl_weight not in (0.0, 1.0):
        return
    alone = "forward" if loss.mixed_kl_weight == 1 else "reverse"
    if loss.kl_type == "mixed":
        yield (
            f"{place}.mixed_kl_weight={loss.mixed_kl_weight:g} leaves only the {alone} part of {place}.kl_type=mixed. "
            f"Set {place}.kl_type={alone}, or a weight between 0 and 1."
        )
    if loss.kl_type == "jensen_shannon":
        yield (
            f"{place}.mixed_kl_weight={loss.mixed_kl_weight:g} makes the divergence of {place}.kl_type=jensen_shannon "
            "always 0. Set a weight between 0 and 1."
        )


def check_other_tokenizers(
    loss: DistillationLossConfig, teachers: Mapping[str, TeacherConfig], policy: PolicyConfig, place: str = "loss_fn"
) -> Findings:
    """Check the keys of a distillation whose teachers may have other tokenizers.

    Args:
        teachers: sections of the teachers by name.
        place: name of the section of the loss.
    """
    both = f"{place}.gold_loss or {place}.xtoken_loss"
    if loss.gold_loss and loss.xtoken_loss:
        yield f"{place}.gold_loss=true and {place}.xtoken_loss=true compare tokens in two ways. Set one to false."
    if loss.crosses_tokenizers and loss.zero_outside_topk:
        yield (
            f"{place}.zero_outside_topk=true has no meaning with {place}.gold_loss and {place}.xtoken_loss, which "
            "compare all other tokens as one. Set it to false."
        )
    if loss.crosses_tokenizers and policy.is_vlm and place == "loss_fn":
        yield f"{both} renders prompts of text. Set policy.tokenizer.use_processor=false."
    if not loss.crosses_tokenizers:
        if loss.vocab_topk is not None and place == "loss_fn":
            yield f"{place}.vocab_topk={loss.vocab_topk} is for {both}. Set distillation.topk_logits_k instead."
        if loss.exact_token_match_only:
            yield f"{place}.exact_token_match_only=true is for {both}. Set one of them to true, or it to false."
    for name, teacher in teachers.items():
        if teacher.projection_matrix_path is not None and not loss.xtoken_loss:
            yield f"{name}.projection_matrix_path is for {place}.xtoken_loss=true. Set it, or leave the file out."


def check_source_of_distillation(source: NamedPartConfig) -> Findings:
    """Refuse dynamic sampling, which compares rewards, because distillation trains without rewards."""
    if source.name == "dynamic_sampling":
        yield (
            "distillation.rollout_source.name=dynamic_sampling keeps prompts whose rewards differ, but distillation "
            "trains without rewards. Use fresh, or the dotted path of a class."
        )
