"""Rules on sampling and training at the same time."""

from nemo_rl.config.base.part_names import is_own_class
from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.algorithms.grpo import GRPOConfig
from nemo_rl.config.schema.algorithms.loss_fn import ClippedPGLossConfig
from nemo_rl.config.schema.algorithms.overlap import AsyncRLConfig
from nemo_rl.config.schema.algorithms.rollout_training import RolloutTrainingConfig
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.model.policy import PolicyConfig


def check_overlap(
    section: str, algorithm: RolloutTrainingConfig, policy: PolicyConfig, cluster: ClusterConfig
) -> Findings:
    """Check that the engines can sample while the policy trains, and that a step's groups fit into the buffer.

    Args:
        section: name of the algorithm's section.
        algorithm: the section.
        policy: the section of the policy.
        cluster: the machines.
    """
    overlap = algorithm.overlap
    if overlap.mode == "none":
        return
    if overlap.mode == "stream" and not isinstance(algorithm, GRPOConfig):
        yield f"{section}.overlap.mode=stream works with GRPO only. Use none or ahead."
    if cluster.uses_gpu and policy.generation is not None and policy.generation.colocated.enabled:
        yield (
            f"{section}.overlap.mode={overlap.mode} samples while the policy trains, but with "
            "policy.generation.colocated.enabled=true engines and policy take turns on the same GPUs. Give the engines "
            "GPUs of their own: policy.generation.colocated.enabled=false, with their number in "
            "policy.generation.colocated.resources."
        )
    factor = algorithm.batch_multiplier if isinstance(algorithm, GRPOConfig) and algorithm.use_dynamic_sampling else 1
    needed = int(algorithm.num_prompts_per_step * factor)
    if overlap.max_buffered_groups is not None and overlap.max_buffered_groups < needed:
        yield (
            f"{section}.overlap.max_buffered_groups={overlap.max_buffered_groups} (async_rl.max_buffered_rollouts) is "
            f"less than the {needed} groups that are sampled for a step, so no step could begin. Use {needed} or more."
        )


def check_stream(grpo: GRPOConfig, policy: PolicyConfig, loss: ClippedPGLossConfig) -> Findings:
    """Check that gradients can be computed group by group: nothing that is computed for one depends on the others."""
    if grpo.overlap.mode != "stream":
        return
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    estimator = grpo.adv_estimator
    reasons = {
        f"policy.train_global_batch_size={policy.train_global_batch_size} makes several updates of the {samples} "
        "answers of a step": policy.train_global_batch_size != samples,
        f"grpo.adv_estimator.name={estimator.name} uses the rewards of the whole step": estimator.name
        not in ("grpo", "dr_grpo", "rloo"),
        "grpo.adv_estimator.std_level=batch uses the rewards of the whole step": estimator.std_level == "batch",
        "grpo.seq_logprob_error_threshold needs a separate forward pass": grpo.seq_logprob_error_threshold is not None,
        f"loss_fn.reference_policy_kl_penalty={loss.reference_policy_kl_penalty:g} needs a separate forward pass": (
            loss.reference_policy_kl_penalty != 0
        ),
        f"loss_fn.name={loss.name} needs a separate forward pass": is_own_class(loss.name),
        "Megatron Core cannot add up gradients over several calls yet": policy.backend_section is policy.megatron_cfg,
    }
    for reason, holds in reasons.items():
        if holds:
            yield f"grpo.overlap.mode=stream trains on groups as they finish, but {reason}. Use none or ahead."


def check_rollout_runners(
    section: str,
    algorithm: RolloutTrainingConfig,
    policy: PolicyConfig,
    cluster: ClusterConfig,
    loss: ClippedPGLossConfig | None = None,
) -> Findings:
    """Check that the driver needs no tokens: advantages follow from rewards, and no score passes through it.

    Args:
        section: name of the algorithm's section.
        algorithm: the section.
        policy: the section of the policy.
        cluster: the machines.
        loss: the loss; None for an algorithm other than GRPO.
    """
    if not cluster.rollout_runners:
        return
    set_to = f"cluster.rollout_runners={cluster.rollout_runners}"
    if not isinstance(algorithm, GRPOConfig) or loss is None:
        yield f"{set_to} works with GRPO only. Use 0."
        return
    samples = algorithm.num_prompts_per_step * algorithm.num_generations_per_prompt
    name = algorithm.adv_estimator.name
    reasons = {
        f"{section}.overlap.mode=ahead stores groups in checkpoints": algorithm.overlap.mode == "ahead",
        f"policy.train_global_batch_size={policy.train_global_batch_size} makes several updates of the {samples} "
        "answers of a step, which need log-probabilities": policy.train_global_batch_size != samples,
        f"{section}.adv_estimator.name={name} has advantages of tokens": name not in ("grpo", "dr_grpo", "rloo"),
        f"{section}.adv_estimator.credit={algorithm.adv_estimator.credit} has advantages of turns": (
            algorithm.adv_estimator.credit != "episode"
        ),
        f"{section}.seq_logprob_error_threshold needs log-probabilities": (
            algorithm.seq_logprob_error_threshold is not None
        ),
        f"loss_fn.reference_policy_kl_penalty={loss.reference_policy_kl_penalty:g} needs log-probabilities": (
            loss.reference_policy_kl_penalty != 0
        ),
        f"loss_fn.name={loss.name} needs log-probabilities": is_own_class(loss.name),
    }
    if policy.generation is not None and policy.generation.num_engines_file is not None:
        yield (
            f"{set_to} gives each runner engines of its own, so none can leave or join "
            f"(policy.generation.num_engines_file={policy.generation.num_engines_file}). Set one of them to 0 or null."
        )
    for reason, holds in reasons.items():
        if holds:
            yield f"{set_to} keeps tokens out of the driver, but {reason}. Use 0."


def check_one_overlap(grpo: GRPOConfig, async_rl: AsyncRLConfig | None) -> Findings:
    """Only one of NeMo RL's two sections describes the overlap."""
    if async_rl is not None and grpo.async_grpo is not None and grpo.async_grpo.enabled:
        yield (
            "async_rl and grpo.async_grpo.enabled=true both describe how sampling and training overlap. Keep one: "
            "async_rl=null, or grpo.async_grpo.enabled=false."
        )
