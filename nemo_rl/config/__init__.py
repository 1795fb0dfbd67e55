"""Every key a user can set, typed, with one sentence each; loading, overrides and checks.

The lowest layer besides `utils`: every other package receives the section it needs. Invariant: importing this package
loads neither torch nor ray.
"""

from nemo_rl.config.checkpointing import CheckpointingConfig
from nemo_rl.config.checks import check_advantages, check_reward_scaling, check_reward_shaping, report_findings
from nemo_rl.config.checks_loss import check_loss_options
from nemo_rl.config.cluster import ClusterConfig, TimeoutsConfig
from nemo_rl.config.data import DataConfig, DatasetConfig, DatasetDefaults
from nemo_rl.config.device_check import check_device, count_gpus
from nemo_rl.config.distillation import (
    DistillationConfig,
    DistillationLossConfig,
    TeacherConfig,
    TeacherPlacementConfig,
)
from nemo_rl.config.dpo import DPOConfig
from nemo_rl.config.env import MathEnvironmentConfig
from nemo_rl.config.eval import EvalConfig, EvalDataConfig, EvalMasterConfig
from nemo_rl.config.generation import (
    ColocatedConfig,
    ColocatedResourcesConfig,
    EngineConfig,
    GenerationConfig,
    VllmConfig,
    WeightSyncConfig,
)
from nemo_rl.config.grpo import (
    AdvantageEstimatorConfig,
    GRPOConfig,
    RewardScalingConfig,
    RewardShapingConfig,
)
from nemo_rl.config.loading import load_config, save_resolved
from nemo_rl.config.logger import LoggerConfig, MlflowConfig, TensorboardConfig, WandbConfig
from nemo_rl.config.loss_fn import ClippedPGLossConfig
from nemo_rl.config.master import GRPOMasterConfig, MasterConfig, RolloutMasterConfig
from nemo_rl.config.master_distillation import DistillationMasterConfig
from nemo_rl.config.master_supervised import (
    DPOMasterConfig,
    RMMasterConfig,
    SFTMasterConfig,
    SupervisedMasterConfig,
)
from nemo_rl.config.names import FEEDBACK_DATASET_NAMES, PREFERENCE_DATASET_NAMES, RESPONSE_DATASET_NAMES
from nemo_rl.config.overrides import OverridesError
from nemo_rl.config.paths import REPOSITORY_ROOT, find_path
from nemo_rl.config.policy import PolicyConfig, RewardModelConfig, TokenizerConfig
from nemo_rl.config.policy_parallel import (
    DTensorConfig,
    DynamicBatchingConfig,
    LoraConfig,
    OptimizerConfig,
    SchedulerConfig,
    SchedulerMilestones,
    SequencePackingConfig,
)
from nemo_rl.config.rm import RMConfig
from nemo_rl.config.rollout_training import RolloutTrainingConfig
from nemo_rl.config.section import Section
from nemo_rl.config.sft import SFTConfig
from nemo_rl.config.supervised import SupervisedConfig, SupervisedDataConfig
from nemo_rl.config.topology import (
    Topology,
    data_parallel_ranks,
    plan_topology,
    students_share,
    teachers_share,
)

__all__ = [
    "FEEDBACK_DATASET_NAMES",
    "PREFERENCE_DATASET_NAMES",
    "SupervisedMasterConfig",
    "SupervisedDataConfig",
    "SupervisedConfig",
    "SFTMasterConfig",
    "SFTConfig",
    "RewardModelConfig",
    "RMMasterConfig",
    "RMConfig",
    "DPOMasterConfig",
    "DPOConfig",
    "DistillationConfig",
    "DistillationLossConfig",
    "DistillationMasterConfig",
    "RolloutMasterConfig",
    "RolloutTrainingConfig",
    "TeacherConfig",
    "TeacherPlacementConfig",
    "REPOSITORY_ROOT",
    "RESPONSE_DATASET_NAMES",
    "AdvantageEstimatorConfig",
    "CheckpointingConfig",
    "ClippedPGLossConfig",
    "ClusterConfig",
    "ColocatedConfig",
    "ColocatedResourcesConfig",
    "DTensorConfig",
    "DataConfig",
    "DatasetConfig",
    "DatasetDefaults",
    "DynamicBatchingConfig",
    "EngineConfig",
    "EvalConfig",
    "EvalDataConfig",
    "EvalMasterConfig",
    "GRPOConfig",
    "GRPOMasterConfig",
    "GenerationConfig",
    "LoggerConfig",
    "LoraConfig",
    "MasterConfig",
    "MathEnvironmentConfig",
    "MlflowConfig",
    "OptimizerConfig",
    "OverridesError",
    "PolicyConfig",
    "RewardScalingConfig",
    "RewardShapingConfig",
    "SchedulerConfig",
    "SchedulerMilestones",
    "Section",
    "SequencePackingConfig",
    "TensorboardConfig",
    "TimeoutsConfig",
    "TokenizerConfig",
    "Topology",
    "VllmConfig",
    "WandbConfig",
    "WeightSyncConfig",
    "check_advantages",
    "check_device",
    "check_loss_options",
    "check_reward_scaling",
    "check_reward_shaping",
    "count_gpus",
    "data_parallel_ranks",
    "find_path",
    "load_config",
    "plan_topology",
    "report_findings",
    "save_resolved",
    "students_share",
    "teachers_share",
]
