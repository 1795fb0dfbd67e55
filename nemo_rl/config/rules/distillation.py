"""Checks keys of on-policy distillation against each other.

Vocabularies are compared in `algorithms.teacher`, which may read tokenizers.
"""

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.algorithms.distillation import DistillationLossConfig, TeacherConfig


def check_teacher(teacher: TeacherConfig) -> Findings:
    """The teacher is a language model without adapters; `second_models` checks the rest."""
    for key in teacher.adapter_keys:
        yield f"teacher.{key}.enabled=true adds untrained adapters. Set it to false."
    if teacher.reward_model_cfg.enabled:
        yield "teacher.reward_model_cfg.enabled=true makes a model that scores whole answers. Set it to false."


def check_distillation_loss(loss: DistillationLossConfig) -> Findings:
    """Check that the weight of the mixed loss leaves both of its parts."""
    if loss.kl_type == "mixed" and loss.mixed_kl_weight in (0.0, 1.0):
        alone = "forward" if loss.mixed_kl_weight == 1 else "reverse"
        yield (
            f"loss_fn.mixed_kl_weight={loss.mixed_kl_weight:g} leaves only the {alone} part of loss_fn.kl_type=mixed. "
            f"Set loss_fn.kl_type={alone}, or a weight between 0 and 1."
        )
