"""Rules of PPO: the advantage formula, and the critic."""

from nemo_rl.config.rules.broken_rules import Findings, nearest_divisors
from nemo_rl.config.schema.algorithms.loss_fn import ClippedPGLossConfig
from nemo_rl.config.schema.algorithms.ppo import PPOConfig, ValueConfig


def check_ppo(ppo: PPOConfig, loss: ClippedPGLossConfig) -> Findings:
    """Check that the critic can be trained alone at first, and that the loss uses what the formula computes."""
    start, last = ppo.policy_training_start_step, ppo.max_num_steps
    if start >= last:
        yield (
            f"ppo.policy_training_start_step={start} trains only the critic in all of the ppo.max_num_steps={last} "
            f"steps. Set it below {last}."
        )
    if ppo.adv_estimator.name == "raw_reward" and ppo.adv_estimator.bootstrap_truncated:
        yield (
            "ppo.adv_estimator.bootstrap_truncated=true adds a value of the critic to the rewards, but "
            "ppo.adv_estimator.name=raw_reward uses no values. Set it to false, or use name=gae."
        )
    if ppo.overlong_filtering and ppo.adv_estimator.bootstrap_truncated:
        yield (
            "ppo.adv_estimator.bootstrap_truncated=true adds a value of the critic to answers that hit a length limit, "
            "but ppo.overlong_filtering=true leaves them out of the loss. Set one of them to false."
        )
    yield from _check_ratio(ppo, loss)


def _check_ratio(ppo: PPOConfig, loss: ClippedPGLossConfig) -> Findings:
    """Check that advantages of tokens are not averaged over the answer, as a ratio of the sequence does."""
    has_one_ratio = not (loss.force_on_policy_ratio or loss.disable_ppo_ratio)
    if not loss.sequence_level_importance_ratios or not has_one_ratio:
        return
    estimator, discount = ppo.adv_estimator.name, ppo.adv_estimator.gae_gamma
    differs = {
        "ppo.adv_estimator.name=gae": estimator == "gae",
        f"ppo.adv_estimator.gae_gamma={discount:g}": discount != 1,
        "loss_fn.use_kl_in_reward=true": loss.use_kl_in_reward,
    }
    reason = next((key for key, holds in differs.items() if holds), None)
    if reason is not None:
        yield (
            "loss_fn.sequence_level_importance_ratios=true (GSPO) gives every answer one ratio, so that only the mean "
            f"of its advantages would count, but {reason} gives each token its own. Set "
            "loss_fn.sequence_level_importance_ratios=false, or use ppo.adv_estimator.name=raw_reward, gae_gamma=1 and "
            "use_kl_in_reward=false, where all tokens of an answer have the same."
        )


def check_value(ppo: PPOConfig, value: ValueConfig) -> Findings:
    """Check that the critic has no adapters, and that the samples of a step divide into its updates."""
    for key in value.adapter_keys:
        yield (
            f"value.{key}.enabled=true freezes everything but adapters, also the critic's new head. "
            "Set it to false: critics are trained in full."
        )
    prompts, answers = ppo.num_prompts_per_step, ppo.num_generations_per_prompt
    samples, batch = prompts * answers, value.train_global_batch_size
    if samples % batch:
        yield (
            f"ppo.num_prompts_per_step={prompts} x ppo.num_generations_per_prompt={answers} = {samples} samples do not "
            f"divide into value.train_global_batch_size={batch}. Nearest values: {nearest_divisors(batch, samples)}."
        )
