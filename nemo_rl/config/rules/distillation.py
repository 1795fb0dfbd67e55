"""Checks keys of on-policy distillation against each other.

Vocabularies are compared in `algorithms.teacher`, which may read tokenizers.
"""

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.rules.model import check_backend, check_budgets
from nemo_rl.config.rules.topology import students_share
from nemo_rl.config.schema.algorithms.distillation import DistillationLossConfig, TeacherConfig
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.model.policy import PolicyConfig


def check_teacher(policy: PolicyConfig, teacher: TeacherConfig, cluster: ClusterConfig) -> Findings:
    """Check that the teacher is a language model, can read the student's answers, and has devices."""
    yield from _check_placement(teacher, cluster)
    yield from check_backend("teacher", teacher)
    for key in teacher.adapter_keys:
        yield f"teacher.{key}.enabled=true adds untrained adapters. Set it to false."
    if teacher.reward_model_cfg.enabled:
        yield "teacher.reward_model_cfg.enabled=true makes a model that scores whole answers. Set it to false."
    longest = policy.max_total_sequence_length
    if teacher.max_total_sequence_length < longest:
        yield (
            f"teacher.max_total_sequence_length={teacher.max_total_sequence_length} is less than "
            f"policy.max_total_sequence_length={longest}: the teacher could not read the longest answers. "
            "Set both to the same value."
        )
    yield from check_budgets("teacher", teacher, longest, ("logprob_mb_tokens",))


def _check_placement(teacher: TeacherConfig, cluster: ClusterConfig) -> Findings:
    placement = teacher.colocated
    if placement.enabled or not cluster.uses_gpu:
        return
    key = "gpus_per_node" if cluster.num_nodes == 1 else "num_nodes"
    if getattr(placement.resources, key) is None:
        yield (
            f"teacher.colocated.enabled=false needs teacher.colocated.resources.{key}: how many of the cluster's "
            "devices the teacher has."
        )
        return
    left = students_share(cluster, placement)
    if left.num_nodes < 1 or left.gpus_per_node < 1:
        yield (
            f"teacher.colocated.resources.{key}={getattr(placement.resources, key)} leaves no device for the policy: "
            f"cluster has {cluster.num_nodes} x {cluster.gpus_per_node} GPUs. Lower it, or set "
            "teacher.colocated.enabled=true."
        )


def check_distillation_loss(loss: DistillationLossConfig) -> Findings:
    """Check that the weight of the mixed loss leaves both of its parts."""
    if loss.kl_type == "mixed" and loss.mixed_kl_weight in (0.0, 1.0):
        alone = "forward" if loss.mixed_kl_weight == 1 else "reverse"
        yield (
            f"loss_fn.mixed_kl_weight={loss.mixed_kl_weight:g} leaves only the {alone} part of loss_fn.kl_type=mixed. "
            f"Set loss_fn.kl_type={alone}, or a weight between 0 and 1."
        )
