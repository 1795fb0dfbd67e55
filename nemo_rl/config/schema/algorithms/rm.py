"""Keys of `rm`: training of a reward model on pairs of answers.

`policy.reward_model_cfg` gives the model its scalar head.
"""

from pydantic import Field

from nemo_rl.config.base.numbers import FactorOrZero
from nemo_rl.config.schema.algorithms.supervised import CountOrAll, PairPolicyConfig, SupervisedConfig
from nemo_rl.config.schema.model.policy import RewardModelConfig


class RMConfig(SupervisedConfig):
    """Reward-model training: steps, validation and the Bradley-Terry loss."""

    max_num_steps: CountOrAll = -1
    """Training stops after this many steps; -1: never."""
    val_period: CountOrAll = 16
    """Validate every this many steps; 0 or -1: only at start or end."""
    val_at_start: bool = False
    """Validate before the first step."""
    val_batches: CountOrAll = -1
    """Batches of one validation; -1: all of the data."""
    margin: FactorOrZero = 0.0
    """Score by which the chosen answer should lead before its loss falls below ln 2."""
    center_rewards_coefficient: FactorOrZero = 0.0
    """Weight of (chosen + rejected)^2, which keeps scores centred on 0."""


class ScoringModelConfig(RewardModelConfig):
    """A scalar head instead of a vocabulary."""

    enabled: bool = True
    """Give the model a scalar head."""


class RMPolicyConfig(PairPolicyConfig):
    """The model that learns to score answers; its batch sizes count pairs."""

    reward_model_cfg: ScoringModelConfig = Field(default_factory=ScoringModelConfig)
    """The scalar head; must stay enabled."""
