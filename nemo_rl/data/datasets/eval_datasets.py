"""Re-export problems with known answers under NeMo RL's path (`nemo_rl.evals.prompts`)."""

from nemo_rl.compat.public_names import public_names

__getattr__ = public_names(__name__, {"load_eval_dataset": "nemo_rl.evals.prompts"})
