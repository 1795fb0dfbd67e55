"""Re-export the functions that export checkpoints under NeMo RL's path."""

from nemo_rl.compat.public_names import public_names

__getattr__ = public_names(__name__, {"convert_dcp_to_hf": "nemo_rl.models.training.backends"})
