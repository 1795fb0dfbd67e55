"""Re-exports of the advantage estimators in `credit.advantages` and, for PPO, `credit.token_credit`."""

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
