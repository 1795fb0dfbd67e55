"""The master configuration of PPO."""

from collections.abc import Mapping
from itertools import chain
from typing import ClassVar, override

from pydantic import Field

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.rules.rewards.ppo import check_ppo, check_value
from nemo_rl.config.rules.training import check_rewards
from nemo_rl.config.runs.rollouts import PolicyGradientMasterConfig
from nemo_rl.config.schema.algorithms.ppo import MseValueLossConfig, PPOConfig, ValueConfig
from nemo_rl.config.schema.checkpointing import CheckpointingConfig
from nemo_rl.config.schema.named_part import NamedPartConfig


class PPOCheckpointingConfig(CheckpointingConfig):
    """Saving and keeping checkpoints; a run started again resumes from the newest one."""

    checkpoint_dir: str = "results/ppo"
    """Folder of the checkpoints, one step_<N> folder each."""


class PPOMasterConfig(PolicyGradientMasterConfig):
    """Configuration of `examples/run_ppo.py`."""

    cpu_config: ClassVar[str] = "examples/configs/ppo_math_cpu.yaml"

    ppo: PPOConfig = Field(default_factory=PPOConfig)
    """The algorithm."""
    value: ValueConfig
    """The critic: the model that predicts rewards."""
    value_loss_fn: MseValueLossConfig = Field(default_factory=MseValueLossConfig)
    """The loss of the critic."""
    checkpointing: PPOCheckpointingConfig = Field(default_factory=PPOCheckpointingConfig)
    """Saving and resuming."""

    @property
    def algorithm(self) -> PPOConfig:
        """The section `ppo`."""
        return self.ppo

    @property
    @override
    def num_epochs(self) -> int:
        return self.ppo.ppo_epochs

    @property
    @override
    def named_parts(self) -> Mapping[str, NamedPartConfig]:
        return {"loss_fn": self.loss_fn, "ppo.rollout_source": self.ppo.rollout_source}

    @override
    def findings(self) -> Findings:
        return chain(
            super().findings(),
            self.policy_gradient_findings("ppo"),
            check_rewards("ppo", self.ppo),
            check_ppo(self.ppo, self.loss_fn),
            check_value(self.ppo, self.value),
        )
