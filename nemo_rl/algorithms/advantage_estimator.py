"""Re-exports of the advantage estimators; see `nemo_rl.algorithms.advantages`."""

from nemo_rl.algorithms.advantages import (
    GDPOAdvantageEstimator,
    GRPOAdvantageEstimator,
    ReinforcePlusPlusAdvantageEstimator,
)

__all__ = [
    "GDPOAdvantageEstimator",
    "GRPOAdvantageEstimator",
    "ReinforcePlusPlusAdvantageEstimator",
]
