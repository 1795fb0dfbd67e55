"""Define the master configurations of SFT, DPO and reward-model training."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import ClassVar, override

from pydantic import Field

from nemo_rl.config.base.names import (
    FEEDBACK_DATASET_NAMES,
    PREFERENCE_DATASET_NAMES,
    RESPONSE_DATASET_NAMES,
    REWARD_DATASET_NAMES,
    SFT_VALIDATION_METRICS,
)
from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.rules.overlap import check_rollout_runners
from nemo_rl.config.rules.supervised import (
    check_best_metric,
    check_datasets,
    check_dpo,
    check_language_model,
    check_pair_data,
    check_reward_model,
    check_supervised,
)
from nemo_rl.config.rules.teachers import check_distillation_loss, check_other_tokenizers, check_teacher
from nemo_rl.config.runs.rollouts import MasterConfig
from nemo_rl.config.schema.algorithms.distillation import TeacherConfig, TeacherLossConfig
from nemo_rl.config.schema.algorithms.supervised import (
    DPOConfig,
    PairPolicyConfig,
    RMConfig,
    RMPolicyConfig,
    SFTConfig,
    SupervisedConfig,
    SupervisedDataConfig,
    SupervisedPolicyConfig,
)
from nemo_rl.config.schema.checkpointing import CheckpointingConfig
from nemo_rl.config.schema.model.policy import RewardModelConfig
from nemo_rl.config.schema.named_part import DPOLossConfig, NamedPartConfig, RMLossConfig, SFTLossConfig


class SFTCheckpointingConfig(CheckpointingConfig):
    """Saving and keeping checkpoints. A run that is started again resumes from the newest one."""

    checkpoint_dir: str = "results/sft"
    """Folder of the checkpoints, each in a folder step_<N>."""
    metric_name: str | None = "val:val_loss"
    """Metric that ranks checkpoints, as val:<name> or train:<name>."""
    higher_is_better: bool = False
    """Whether a larger metric is better."""


class DPOCheckpointingConfig(SFTCheckpointingConfig):
    """Saving and keeping checkpoints. A run that is started again resumes from the newest one."""

    checkpoint_dir: str = "results/dpo"
    """Folder of the checkpoints, each in a folder step_<N>."""
    metric_name: str | None = "val:loss"
    """Metric that ranks checkpoints, as val:<name> or train:<name>."""


class RMCheckpointingConfig(DPOCheckpointingConfig):
    """Saving and keeping checkpoints. A run that is started again resumes from the newest one."""

    checkpoint_dir: str = "results/rm"
    """Folder of the checkpoints, each in a folder step_<N>."""


class SupervisedMasterConfig(MasterConfig):
    """Base of the configurations of supervised training."""

    section: ClassVar[str]
    """Name of the algorithm's section."""
    validation_metrics: ClassVar[tuple[str, ...] | None] = None
    """All metrics of a validation. None if they depend on the loss."""
    ignored: ClassVar[dict[str, str]] = MasterConfig.ignored | {"env": "nothing is rewarded here"}

    policy: SupervisedPolicyConfig
    """The model that is trained."""
    data: SupervisedDataConfig = Field(default_factory=SupervisedDataConfig)
    """Data sets."""

    @property
    def algorithm(self) -> SupervisedConfig:
        """The section of the algorithm."""
        found: SupervisedConfig = getattr(self, self.section)
        return found

    @property
    @override
    def named_parts(self) -> Mapping[str, NamedPartConfig]:
        return {"loss_fn": self["loss_fn"]}

    @override
    def findings(self) -> Findings:
        return chain(
            super().findings(),
            check_rollout_runners(None, None, self.cluster),
            check_supervised(self.section, self.algorithm, self.policy, self.data, self.policy_cluster),
            check_best_metric(self.checkpointing, self.data, self.validation_metrics),
        )


class SFTMasterConfig(SupervisedMasterConfig):
    """Configuration of `examples/run_sft.py`."""

    reads_images: ClassVar[bool] = True
    section: ClassVar[str] = "sft"
    validation_metrics: ClassVar[tuple[str, ...] | None] = tuple(SFT_VALIDATION_METRICS.values())
    cpu_config: ClassVar[str] = "examples/configs/sft_cpu.yaml"

    sft: SFTConfig = Field(default_factory=SFTConfig)
    """The algorithm."""
    loss_fn: SFTLossConfig = Field(default_factory=SFTLossConfig)
    """The loss."""
    teacher: TeacherConfig | None = None
    """A teacher that predicts the tokens of the rows, in addition to the rows themselves. null: none."""
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Further teachers of all rows, by any name. Their divergences are added, each with its weight."""
    teacher_loss_fn: TeacherLossConfig = Field(default_factory=TeacherLossConfig)
    """The loss of a run with teachers, in place of loss_fn."""
    checkpointing: SFTCheckpointingConfig = Field(default_factory=SFTCheckpointingConfig)
    """Saving and resuming."""

    @override
    def findings(self) -> Findings:
        return chain(
            super().findings(),
            check_language_model(self.policy),
            check_datasets(self.data, RESPONSE_DATASET_NAMES),
            self._of_teachers(),
        )

    @property
    def sections_of_teachers(self) -> dict[str, TeacherConfig]:
        """Return the sections of all teachers by the names of their models in the run."""
        first = {} if self.teacher is None else {"teacher": self.teacher}
        return {**first, **{f"teachers.{name}": each for name, each in self.teachers.items()}}

    def _of_teachers(self) -> Findings:
        teachers, place = self.sections_of_teachers, "teacher_loss_fn"
        if not teachers:
            return
        for name, teacher in teachers.items():
            yield from check_teacher(name, teacher)
        yield from check_distillation_loss(self.teacher_loss_fn, place)
        yield from check_other_tokenizers(self.teacher_loss_fn, teachers, self.policy, place)
        if self.policy.is_vlm:
            yield "teacher and teachers read rows of text. Set policy.tokenizer.use_processor=false."

    @override
    def unused(self) -> Iterator[tuple[str, Sequence[str], str]]:
        yield from super().unused()
        sections = ["teacher", "teachers"]
        if self.sections_of_teachers:
            yield "loss_fn", sections, "the loss is teacher_loss_fn"
        else:
            yield "teacher_loss_fn", sections, "there is no teacher"


class DPOMasterConfig(SupervisedMasterConfig):
    """Configuration of `examples/run_dpo.py`."""

    reads_images: ClassVar[bool] = True
    section: ClassVar[str] = "dpo"
    cpu_config: ClassVar[str] = "examples/configs/dpo_cpu.yaml"

    dpo: DPOConfig = Field(default_factory=DPOConfig)
    """The algorithm."""
    loss_fn: DPOLossConfig = Field(default_factory=DPOLossConfig)
    """The loss."""
    policy: PairPolicyConfig
    """The model that is trained."""
    checkpointing: DPOCheckpointingConfig = Field(default_factory=DPOCheckpointingConfig)
    """Saving and resuming."""

    @property
    def keeps_reference(self) -> bool:
        """Return True if the loss compares with the initial policy, as in all variants but SimPO and ORPO."""
        return self.dpo.preference_loss not in ("simpo", "orpo")

    @override
    def rows_of(self, model: str) -> int:
        return 1 if self.dpo.preference_loss == "kto" else 2

    @override
    def findings(self) -> Findings:
        return chain(
            super().findings(),
            check_dpo(self.dpo),
            check_language_model(self.policy),
            check_pair_data(self.dpo, self.data),
            check_datasets(self.data, PREFERENCE_DATASET_NAMES + FEEDBACK_DATASET_NAMES),
        )


class RMMasterConfig(SupervisedMasterConfig):
    """Configuration of `examples/run_rm.py`."""

    section: ClassVar[str] = "rm"
    cpu_config: ClassVar[str] = "examples/configs/rm_cpu.yaml"

    rm: RMConfig = Field(default_factory=RMConfig)
    """The algorithm."""
    loss_fn: RMLossConfig = Field(default_factory=RMLossConfig)
    """The loss."""
    policy: RMPolicyConfig
    """The model that is trained."""
    checkpointing: RMCheckpointingConfig = Field(default_factory=RMCheckpointingConfig)
    """Saving and resuming."""

    @property
    def head(self) -> RewardModelConfig:
        """Return the section of the head for scores."""
        return self.policy.reward_model_cfg

    @override
    def rows_of(self, model: str) -> int:
        return 2 if self.head.reward_model_type == "bradley_terry" else 1

    @override
    def findings(self) -> Findings:
        return chain(
            super().findings(),
            check_reward_model(self.rm, self.policy, self.data),
            check_datasets(self.data, REWARD_DATASET_NAMES[self.head.reward_model_type]),
        )
