"""Check keys of sampling and training at the same time."""

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.algorithms.grpo import FROM_REWARDS, GRPOConfig
from nemo_rl.config.schema.algorithms.loss_fn import ClippedPGLossConfig
from nemo_rl.config.schema.algorithms.overlap import AsyncRLConfig
from nemo_rl.config.schema.algorithms.rollout_training import RewardedTrainingConfig, RolloutTrainingConfig
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.model.policy import PolicyConfig


def check_overlap(
    section: str, algorithm: RolloutTrainingConfig, policy: PolicyConfig, cluster: ClusterConfig
) -> Findings:
    """Check that engines can sample while the policy trains, and that a step's groups fit into the buffer.

    Args:
        section: name of the algorithm's section.
    """
    overlap = algorithm.overlap
    if overlap.mode == "none":
        if overlap.validation != "stop":
            yield (
                f"{section}.overlap.validation={overlap.validation} validates while training goes on, but "
                f"{section}.overlap.mode=none lets sampling and training take turns. Use mode=ahead, or "
                "validation=stop."
            )
        return
    failures = overlap.group_failures
    if failures.max_skipped_prompts and failures.max_attempts_per_prompt is None:
        yield (
            f"{section}.overlap.group_failures.max_skipped_prompts={failures.max_skipped_prompts} skips prompts after "
            "max_attempts_per_prompt attempts, which is null. Set it to the number of attempts."
        )
    if overlap.validation == "through_updates" and cluster.rollout_runners:
        yield (
            f"{section}.overlap.validation=through_updates does not work with "
            f"cluster.rollout_runners={cluster.rollout_runners} yet. Use hold_updates or stop."
        )
    if cluster.uses_gpu and policy.generation is not None and policy.generation.colocated.enabled:
        yield (
            f"{section}.overlap.mode={overlap.mode} samples while the policy trains, but with "
            "policy.generation.colocated.enabled=true engines and policy take turns on the same GPUs. Give the engines "
            "GPUs of their own: policy.generation.colocated.enabled=false, with their number in "
            "policy.generation.colocated.resources."
        )
    draws_more = isinstance(algorithm, RewardedTrainingConfig) and algorithm.use_dynamic_sampling
    factor = algorithm.batch_multiplier if draws_more else 1
    needed = int(algorithm.num_prompts_per_step * factor)
    if overlap.max_buffered_groups is not None and overlap.max_buffered_groups < needed:
        yield (
            f"{section}.overlap.max_buffered_groups={overlap.max_buffered_groups} (async_rl.max_buffered_rollouts) is "
            f"less than the {needed} groups that are sampled for a step, so no step could begin. Use {needed} or more."
        )


def check_stale_mismatch(section: str, algorithm: RewardedTrainingConfig, loss: ClippedPGLossConfig) -> Findings:
    """Refuse a threshold for the mismatch with the engine if the loss does not measure it for stale tokens.

    Args:
        section: name of the algorithm's section.
    """
    threshold = algorithm.seq_logprob_error_threshold
    if algorithm.overlap.mode == "ahead" and threshold is not None and not loss.corrects_staleness:
        yield (
            f"{section}.seq_logprob_error_threshold={threshold:g} masks no answer of older weights: without "
            f"loss_fn.use_importance_sampling_correction, {section}.overlap.mode=ahead takes the engine's "
            "log-probabilities of these tokens for the policy's. Set "
            f"loss_fn.use_importance_sampling_correction=true, or {section}.seq_logprob_error_threshold=null."
        )


def check_rollout_runners(
    algorithm: RolloutTrainingConfig | None, policy: PolicyConfig | None, cluster: ClusterConfig
) -> Findings:
    """Check that runners can sample the rollouts: GRPO with advantages that follow from rewards alone.

    Args:
        algorithm: the section of the algorithm. None for a run without training on rollouts, such as an evaluation.
    """
    if not cluster.rollout_runners:
        return
    set_to = f"cluster.rollout_runners={cluster.rollout_runners}"
    if not isinstance(algorithm, GRPOConfig):
        yield f"{set_to} works with GRPO only. Use 0."
        return
    name = algorithm.adv_estimator.name
    if name not in FROM_REWARDS:
        yield (
            f"{set_to} keeps tokens out of the driver, but grpo.adv_estimator.name={name} may need them. Use 0, or one "
            f"of {', '.join(FROM_REWARDS)}, whose advantages follow from rewards alone."
        )
    if algorithm.adv_estimator.credit != "episode":
        yield (
            f"{set_to} keeps tokens out of the driver, but grpo.adv_estimator.credit={algorithm.adv_estimator.credit} "
            "has advantages of turns. Use 0, or credit=episode."
        )
    for key in ("invalid_tool_call_advantage", "malformed_thinking_advantage"):
        if getattr(algorithm, key) is not None:
            yield f"{set_to} keeps tokens out of the driver, but grpo.{key} is an advantage of tokens. Use 0."
    generation = policy.generation if policy else None
    if generation is not None and generation.num_engines_file is not None:
        yield (
            f"{set_to} gives each runner engines of its own, so none can leave or join "
            f"(policy.generation.num_engines_file={generation.num_engines_file}). Set one of them to 0 or null."
        )


def check_one_overlap(grpo: GRPOConfig, async_rl: AsyncRLConfig | None) -> Findings:
    """Check that only one of NeMo RL's two sections describes the overlap."""
    if async_rl is not None and grpo.async_grpo is not None and grpo.async_grpo.enabled:
        yield (
            "async_rl and grpo.async_grpo.enabled=true both describe how sampling and training overlap. Keep one: "
            "async_rl=null, or grpo.async_grpo.enabled=false."
        )
