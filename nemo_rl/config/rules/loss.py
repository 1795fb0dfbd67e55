"""Checks the keys of `loss_fn` against each other and against the run.

`PolicyGradientMasterConfig.check` runs all of these rules before anything starts; `losses.policy_gradient` runs
`check_loss_options` again, because a loss can be made without a run.
"""

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.algorithms.loss_fn import ClippedPGLossConfig
from nemo_rl.config.schema.algorithms.rollout_training import RewardedTrainingConfig
from nemo_rl.config.schema.model.policy import PolicyConfig


def check_loss(
    section: str, algorithm: RewardedTrainingConfig, policy: PolicyConfig, loss: ClippedPGLossConfig, epochs: int = 1
) -> Findings:
    """Check that loss options contradict neither each other nor the run.

    Args:
        section: name of the algorithm's section.
        algorithm: the section.
        policy: the section of the policy.
        loss: the section of the loss.
        epochs: passes over the samples of a step.
    """
    penalty = f"loss_fn.reference_policy_kl_penalty={loss.reference_policy_kl_penalty:g}"
    if algorithm.skip_reference_policy_logprobs_calculation and loss.reference_policy_kl_penalty != 0:
        yield (
            f"{penalty} needs the reference policy, but "
            f"{section}.skip_reference_policy_logprobs_calculation=true. Set the penalty to 0 or the skip to false."
        )
    if loss.use_kl_in_reward and loss.reference_policy_kl_penalty == 0:
        yield f"loss_fn.use_kl_in_reward=true has no effect with {penalty}. Give the penalty a weight."
    samples = algorithm.num_prompts_per_step * algorithm.num_generations_per_prompt
    updates = samples // policy.train_global_batch_size
    if loss.force_on_policy_ratio and updates * epochs > 1:
        passes, one = (f" x {section}.ppo_epochs={epochs}", f" and {section}.ppo_epochs=1") if epochs > 1 else ("", "")
        yield (
            "loss_fn.force_on_policy_ratio=true needs one optimizer update per step, but "
            f"{samples} samples / policy.train_global_batch_size={policy.train_global_batch_size}{passes} = "
            f"{updates * epochs} updates. Set policy.train_global_batch_size={samples}{one}."
        )
    yield from check_loss_options(loss)


def check_loss_options(loss: ClippedPGLossConfig) -> Findings:
    """Check that the options of one loss do not contradict each other."""
    yield from _check_ratio(loss)
    yield from _check_sequences(loss)
    yield from _check_importance_sampling(loss)


def _check_ratio(loss: ClippedPGLossConfig) -> Findings:
    if loss.disable_ppo_ratio and loss.use_cispo:
        yield (
            "loss_fn.use_cispo=true shapes the probability ratio, which loss_fn.disable_ppo_ratio=true removes. "
            "Keep one of the two."
        )
    if loss.use_cispo and loss.ratio_clip_c is not None:
        yield "loss_fn.use_cispo=true has no dual clip. Set loss_fn.ratio_clip_c=null."
    if loss.use_cispo and loss.force_on_policy_ratio:
        yield (
            "loss_fn.use_cispo=true clips the ratio that loss_fn.force_on_policy_ratio=true takes as 1. "
            "Keep one of the two."
        )
    if loss.ratio_clip_max < 0 and not loss.use_cispo:
        yield (
            f"loss_fn.ratio_clip_max={loss.ratio_clip_max:g} puts the upper bound of the ratio below 1, which only "
            "loss_fn.use_cispo=true allows. Give a value of at least 0."
        )
    if loss.ratio_clip_max < -loss.ratio_clip_min:
        yield (
            f"loss_fn.ratio_clip_max={loss.ratio_clip_max:g} and loss_fn.ratio_clip_min={loss.ratio_clip_min:g} put "
            "the upper bound of the ratio below the lower one. Raise one of them, for example ratio_clip_min=1."
        )


def _check_sequences(loss: ClippedPGLossConfig) -> Findings:
    """Check that the loss averages over tokens or sequences as the level of the ratio requires."""
    if loss.sequence_level_importance_ratios and loss.token_level_loss:
        yield (
            "loss_fn.sequence_level_importance_ratios=true (GSPO) gives every sequence one ratio, so its loss is a "
            "mean over sequences. Set loss_fn.token_level_loss=false."
        )
    if loss.use_cispo and not loss.token_level_loss:
        yield "loss_fn.use_cispo=true is a mean over tokens. Set loss_fn.token_level_loss=true."
    if loss.constant_sample_length is not None and not loss.token_level_loss:
        yield (
            f"loss_fn.constant_sample_length={loss.constant_sample_length:g} replaces the length of each answer, by "
            "which loss_fn.token_level_loss=false divides. Set loss_fn.token_level_loss=true."
        )


def _check_importance_sampling(loss: ClippedPGLossConfig) -> Findings:
    kind = loss.truncated_importance_sampling_type
    low = loss.truncated_importance_sampling_ratio_min
    high = loss.truncated_importance_sampling_ratio
    has_bounds = low is not None or high is not None
    if (kind or has_bounds) and not loss.use_importance_sampling_correction:
        yield (
            "loss_fn.truncated_importance_sampling_* bounds the weights of "
            "loss_fn.use_importance_sampling_correction, which is false. Set it to true or the bounds "
            "to null."
        )
    if kind is None and has_bounds:
        yield (
            f"loss_fn.truncated_importance_sampling_ratio={high} and _ratio_min={low} are bounds of "
            "loss_fn.truncated_importance_sampling_type, which is null. Set it to tis, icepop or seq-mask-tis."
        )
    if kind is not None and high is None:
        yield (
            f"loss_fn.truncated_importance_sampling_type={kind} needs "
            "loss_fn.truncated_importance_sampling_ratio, the upper bound, for example 2.0."
        )
    if kind in ("icepop", "seq-mask-tis") and low is None:
        yield (
            f"loss_fn.truncated_importance_sampling_type={kind} needs "
            "loss_fn.truncated_importance_sampling_ratio_min, the lower bound, for example 0.5."
        )
    if kind == "seq-mask-tis" and loss.sequence_level_importance_ratios:
        yield (
            "loss_fn.truncated_importance_sampling_type=seq-mask-tis bounds the geometric mean of token weights, but "
            "loss_fn.sequence_level_importance_ratios=true gives a sequence one weight. Use tis or icepop."
        )
    if low is not None and high is not None and low > high:
        yield (
            f"loss_fn.truncated_importance_sampling_ratio_min={low:g} must not exceed "
            f"loss_fn.truncated_importance_sampling_ratio={high:g}."
        )
