"""Define every key that a user can set, and load, override and check configurations.

The package is the lowest layer of the library besides `utils`. Every other package receives the sections of the
configuration that it needs. Invariant: importing this package loads neither torch nor ray.
"""

from nemo_rl.config.base.hidden_values import public_text, public_values
from nemo_rl.config.base.names import FEEDBACK_DATASET_NAMES, PREFERENCE_DATASET_NAMES, RESPONSE_DATASET_NAMES
from nemo_rl.config.base.paths import REPOSITORY_ROOT, find_path
from nemo_rl.config.base.section import Section
from nemo_rl.config.loading.load import config_of, load_config, save_resolved
from nemo_rl.config.loading.overrides import OverridesError
from nemo_rl.config.rules.broken_rules import report_findings
from nemo_rl.config.rules.models import check_second_models
from nemo_rl.config.rules.topology import (
    Role,
    Topology,
    busy_engines,
    data_parallel_ranks,
    divide_cluster,
    model_ranks,
    parallel_sizes,
    plan_topology,
    row_length_multiple,
    sharing,
    trained,
)
from nemo_rl.config.rules.training import (
    check_advantages,
    check_loss_options,
    check_reward_scaling,
    check_reward_shaping,
)
from nemo_rl.config.runs.devices import check_device, count_gpus
from nemo_rl.config.runs.eval import EvalMasterConfig
from nemo_rl.config.runs.rollouts import (
    DistillationMasterConfig,
    GRPOMasterConfig,
    MasterConfig,
    PolicyGradientMasterConfig,
    PPOMasterConfig,
    RolloutMasterConfig,
)
from nemo_rl.config.runs.run import RunConfig
from nemo_rl.config.runs.supervised import (
    DPOMasterConfig,
    RMMasterConfig,
    SFTMasterConfig,
    SupervisedMasterConfig,
)
from nemo_rl.config.schema.algorithms.distillation import (
    DistillationConfig,
    DistillationLossConfig,
    TeacherConfig,
)
from nemo_rl.config.schema.algorithms.evaluation import EvalConfig, EvalDataConfig
from nemo_rl.config.schema.algorithms.grpo import AdvantageEstimatorConfig, GRPOConfig
from nemo_rl.config.schema.algorithms.loss_fn import ClippedPGLossConfig
from nemo_rl.config.schema.algorithms.overlap import AsyncGRPOConfig, AsyncRLConfig, OverlapConfig
from nemo_rl.config.schema.algorithms.ppo import (
    AsyncPPOConfig,
    MseValueLossConfig,
    PPOAdvantageConfig,
    PPOConfig,
    ValueConfig,
)
from nemo_rl.config.schema.algorithms.reward_penalties import (
    EffortLevelConfig,
    RewardPenaltyConfig,
    RewardPenaltyTokenIdsConfig,
)
from nemo_rl.config.schema.algorithms.rollout_training import (
    RewardedTrainingConfig,
    RewardScalingConfig,
    RewardShapingConfig,
    RolloutTrainingConfig,
)
from nemo_rl.config.schema.algorithms.supervised import (
    DPOConfig,
    RMConfig,
    SFTConfig,
    SupervisedConfig,
    SupervisedDataConfig,
)
from nemo_rl.config.schema.algorithms.teachers import (
    OnPolicyDistillationConfig,
    SelfDistillationConfig,
    TeacherEndpointConfig,
    TokenWeightsConfig,
)
from nemo_rl.config.schema.checkpointing import CheckpointingConfig
from nemo_rl.config.schema.cluster import ClusterConfig, TimeoutsConfig, VenvConfig
from nemo_rl.config.schema.data import (
    AccuracyRuleConfig,
    CurriculumConfig,
    CurriculumPhase,
    DataConfig,
    DatasetConfig,
    DatasetDefaults,
)
from nemo_rl.config.schema.env import MathEnvironmentConfig
from nemo_rl.config.schema.logger import (
    LoggerConfig,
    MlflowConfig,
    PrometheusConfig,
    SwanlabConfig,
    TensorboardConfig,
    TrackioConfig,
    WandbConfig,
)
from nemo_rl.config.schema.model.generation import (
    ColocatedConfig,
    ColocatedResourcesConfig,
    EngineConfig,
    GenerationConfig,
    VllmConfig,
    WeightSyncConfig,
)
from nemo_rl.config.schema.model.megatron import MegatronConfig
from nemo_rl.config.schema.model.parallel import (
    DTensorConfig,
    DynamicBatchingConfig,
    LoraConfig,
    OptimizerConfig,
    SchedulerConfig,
    SchedulerMilestones,
    SequencePackingConfig,
)
from nemo_rl.config.schema.model.policy import PlacementConfig, PolicyConfig, RewardModelConfig, TokenizerConfig
from nemo_rl.config.schema.named_part import NamedPartConfig, RolloutSourceConfig
from nemo_rl.config.schema.second_model import SecondModelConfig
