"""Re-export the functions of reward shaping in `nemo_rl.algorithms.credit.reward_shaping`."""

from nemo_rl.algorithms.credit.reward_shaping import apply_reward_shaping
from nemo_rl.config import RewardShapingConfig

__all__ = ["RewardShapingConfig", "apply_reward_shaping"]
