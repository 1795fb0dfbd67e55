"""Re-exports of the advantage estimators; see `nemo_rl.algorithms.credit.advantages`."""

from nemo_rl.algorithms.credit.advantages import (
    GDPOAdvantageEstimator,
    GRPOAdvantageEstimator,
    ReinforcePlusPlusAdvantageEstimator,
)

__all__ = [
    "GDPOAdvantageEstimator",
    "GRPOAdvantageEstimator",
    "ReinforcePlusPlusAdvantageEstimator",
]
