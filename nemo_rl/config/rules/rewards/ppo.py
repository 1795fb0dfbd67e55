"""Rules of PPO: the advantage formula, and the critic."""

from nemo_rl.config.rules.broken_rules import Findings, nearest_divisors
from nemo_rl.config.schema.algorithms.ppo import PPOConfig, ValueConfig


def check_ppo(ppo: PPOConfig) -> Findings:
    """Check that the critic can be trained alone at first, and that values exist where the formula uses them."""
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


def check_value(ppo: PPOConfig, value: ValueConfig) -> Findings:
    """Check that the critic has a scalar head, and that the samples of a step divide into its updates."""
    if not value.reward_model_cfg.enabled:
        yield "value.reward_model_cfg.enabled=false: a critic has a scalar head. Set it to true, or leave it out."
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
