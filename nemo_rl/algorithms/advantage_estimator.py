"""Re-exports of the advantage estimators; see `credit.advantages`, and `credit.token_credit` for those of PPO."""

from nemo_rl.algorithms.credit.advantages import (
    GDPOAdvantageEstimator,
    GRPOAdvantageEstimator,
    ReinforcePlusPlusAdvantageEstimator,
)
from nemo_rl.algorithms.credit.token_credit import GeneralizedAdvantageEstimator, RawRewardAdvantageEstimator

__all__ = [
    "GDPOAdvantageEstimator",
    "GRPOAdvantageEstimator",
    "GeneralizedAdvantageEstimator",
    "RawRewardAdvantageEstimator",
    "ReinforcePlusPlusAdvantageEstimator",
]
