"""Define the sections of the algorithms: GRPO, PPO, distillation, SFT, DPO, RM, evaluation and their losses."""
