"""Re-exports the export of checkpoints under NeMo RL's path (see `nemo_rl.models.training.backends`)."""

from nemo_rl.compat.public_names import public_names

__getattr__ = public_names(__name__, {"convert_dcp_to_hf": "nemo_rl.models.training.backends"})
