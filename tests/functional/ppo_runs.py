"""What the tests of PPO runs share: the example, and overrides for a run of a few seconds."""

SCRIPT, CONFIG = "run_ppo.py", "ppo_math_cpu.yaml"
SMALL = (
    *("ppo.num_prompts_per_step=4", "ppo.num_generations_per_prompt=4", "policy.train_global_batch_size=8"),
    *("policy.train_micro_batch_size=8", "value.train_global_batch_size=8", "value.train_micro_batch_size=8"),
    *("ppo.val_at_start=false", "logger.tensorboard_enabled=false"),
)
"""16 samples a step; policy and critic make 2 updates in each of 2 passes over them."""
SMALL_HF = (*SMALL, "policy.generation.backend=hf")
"""The same without vLLM, whose start takes the longest."""
