"""Keys of `logger`: destinations of a run's metrics and samples.

Invariant: every tracker has a `<name>_enabled` switch and a section with its own keys.
"""

from typing import ClassVar

from pydantic import Field, NonNegativeInt, PositiveFloat

from nemo_rl.config.base.section import Section


class WandbConfig(Section):
    """Weights & Biases."""

    later: ClassVar[dict[str, str]] = {"log_nemo_gym_full_result_tables": "NeMo-Gym"}

    project: str | None = "grpo-dev"
    """Project of the run."""
    name: str | None = "grpo-dev-logger"
    """Name of the run."""
    entity: str | None = None
    """Team or user that owns the project."""


class TensorboardConfig(Section):
    """TensorBoard."""

    ignored: ClassVar[dict[str, str]] = {
        "log_dir": "TensorBoard files are always in <logger.log_dir>/exp_NNN/tensorboard",
    }


class MlflowConfig(Section):
    """MLflow."""

    experiment_name: str | None = "grpo-dev"
    """Experiment of the run."""
    run_name: str | None = "grpo-dev-logger"
    """Name of the run."""
    tracking_uri: str | None = None
    """Address of a server or of a database (sqlite:///mlflow.db); null: MLFLOW_TRACKING_URI, or without it a database
    in the run's folder, exp_NNN/mlflow/mlflow.db."""
    artifact_location: str | None = None
    """Place where a new experiment puts artifacts."""
    run_id: str | None = None
    """Existing run to continue; null: a new one."""


class SwanlabConfig(Section):
    """SwanLab."""

    project: str | None = "grpo-dev"
    """Project of the run."""
    name: str | None = "grpo-dev-logger"
    """Name of the run."""


class GpuMonitoringConfig(Section):
    """Load of the machines, with logger.monitor_gpus."""

    collection_interval: PositiveFloat = 10.0
    """Seconds between two readings of a node."""
    flush_interval: PositiveFloat = 10.0
    """Seconds after which readings are sent to the trackers."""


class LoggerConfig(Section):
    """Console, trackers and files; each run writes to its own folder log_dir/exp_NNN."""

    log_dir: str = "logs"
    """Folder of all runs; a run makes exp_NNN below it."""
    num_val_samples_to_print: NonNegativeInt = 0
    """Validation conversations shown on the console."""
    save_trajectories: bool = True
    """Write every rollout of a step to train_data_step<N>.jsonl."""
    monitor_gpus: bool = True
    """Report processors, memory and GPUs of every node under ray/."""
    gpu_monitoring: GpuMonitoringConfig = Field(default_factory=GpuMonitoringConfig)
    """Load of the machines, with monitor_gpus."""
    wandb_enabled: bool = False
    """Report to Weights & Biases."""
    tensorboard_enabled: bool = False
    """Write TensorBoard files."""
    mlflow_enabled: bool = False
    """Report to MLflow (extra `mlflow`)."""
    swanlab_enabled: bool = False
    """Report to SwanLab (extra `swanlab`)."""
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    """Weights & Biases."""
    tensorboard: TensorboardConfig = Field(default_factory=TensorboardConfig)
    """TensorBoard."""
    mlflow: MlflowConfig = Field(default_factory=MlflowConfig)
    """MLflow."""
    swanlab: SwanlabConfig = Field(default_factory=SwanlabConfig)
    """SwanLab."""
