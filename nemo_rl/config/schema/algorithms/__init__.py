"""Sections of the algorithms: GRPO, distillation, SFT, DPO, RM, evaluation and their losses."""
