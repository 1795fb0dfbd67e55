"""The master configuration of on-policy distillation."""

from collections.abc import Mapping
from itertools import chain
from typing import ClassVar, override

from pydantic import Field

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.rules.data import check_data
from nemo_rl.config.rules.distillation import check_distillation_loss, check_teacher
from nemo_rl.config.rules.named_parts import check_source_of_distillation
from nemo_rl.config.rules.overlap import check_overlap, check_rollout_runners
from nemo_rl.config.rules.training import (
    check_batches,
    check_early_stop,
    check_generation,
    check_lengths,
    check_validation,
)
from nemo_rl.config.runs.rollouts import MasterConfig, RolloutMasterConfig
from nemo_rl.config.schema.algorithms.distillation import (
    CROSS_TOKENIZER,
    DistillationConfig,
    DistillationLossConfig,
    TeacherConfig,
)
from nemo_rl.config.schema.checkpointing import CheckpointingConfig
from nemo_rl.config.schema.model.policy import PolicyConfig
from nemo_rl.config.schema.named_part import NamedPartConfig


class DistillationCheckpointingConfig(CheckpointingConfig):
    """Saving and keeping checkpoints; a run started again resumes from the newest one."""

    checkpoint_dir: str = "results/distillation"
    """Folder of the checkpoints, one step_<N> folder each."""


class DistillationMasterConfig(RolloutMasterConfig):
    """Configuration of `examples/run_distillation.py`."""

    cpu_config: ClassVar[str] = "examples/configs/distillation_math_cpu.yaml"

    later: ClassVar[dict[str, str]] = MasterConfig.later | {"teachers": CROSS_TOKENIZER}

    distillation: DistillationConfig = Field(default_factory=DistillationConfig)
    """The algorithm."""
    loss_fn: DistillationLossConfig = Field(default_factory=DistillationLossConfig)
    """The divergence between teacher and student."""
    policy: PolicyConfig
    """The student: the model that is trained."""
    teacher: TeacherConfig
    """The model that the student learns from."""
    checkpointing: DistillationCheckpointingConfig = Field(default_factory=DistillationCheckpointingConfig)
    """Saving and resuming."""

    @property
    def algorithm(self) -> DistillationConfig:
        """The section `distillation`."""
        return self.distillation

    @property
    @override
    def named_parts(self) -> Mapping[str, NamedPartConfig]:
        return {"loss_fn": self.loss_fn, "distillation.rollout_source": self.distillation.rollout_source}

    @override
    def findings(self) -> Findings:
        return chain(
            super().findings(),
            check_source_of_distillation(self.distillation.rollout_source),
            check_overlap("distillation", self.distillation, self.policy, self.cluster),
            check_rollout_runners(self.distillation, self.policy, self.cluster),
            check_teacher(self.teacher),
            check_batches("distillation", self.distillation, self.policy, self.policy_cluster),
            check_lengths(self.policy, self.data),
            check_generation(self.policy, self.policy_cluster),
            check_distillation_loss(self.loss_fn),
            check_early_stop("distillation", self.distillation),
            check_data(self.data, self.env),
            check_validation("distillation", self.distillation, self.data),
        )
