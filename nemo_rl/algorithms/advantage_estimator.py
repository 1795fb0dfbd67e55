"""Re-export the advantage estimators of `credit.advantages` and, for PPO, those of `credit.token_credit`."""

from nemo_rl.algorithms.credit.advantages import (
    GDPOAdvantageEstimator,
    GRPOAdvantageEstimator,
    OPDAdvantageEstimator,
    ReinforcePlusPlusAdvantageEstimator,
)
from nemo_rl.algorithms.credit.token_credit import GeneralizedAdvantageEstimator, RawRewardAdvantageEstimator

__all__ = [
    "GDPOAdvantageEstimator",
    "GRPOAdvantageEstimator",
    "GeneralizedAdvantageEstimator",
    "OPDAdvantageEstimator",
    "RawRewardAdvantageEstimator",
    "ReinforcePlusPlusAdvantageEstimator",
]
