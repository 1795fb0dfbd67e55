"""Keys of `logger`: destinations of a run's metrics and samples.

Invariant: every tracker has a `<name>_enabled` switch and a section with its own keys.
"""

from typing import ClassVar

from pydantic import Field, NonNegativeInt

from nemo_rl.config.base.section import Section


class WandbConfig(Section):
    """Weights & Biases."""

    later: ClassVar[dict[str, str]] = {"log_nemo_gym_full_result_tables": "NeMo-Gym"}

    project: str | None = Field(default="grpo-dev", description="Project of the run.")
    name: str | None = Field(default="grpo-dev-logger", description="Name of the run.")
    entity: str | None = Field(default=None, description="Team or user that owns the project.")


class TensorboardConfig(Section):
    """TensorBoard."""

    ignored: ClassVar[dict[str, str]] = {
        "log_dir": "TensorBoard files are always in <logger.log_dir>/exp_NNN/tensorboard",
    }


class MlflowConfig(Section):
    """MLflow."""

    experiment_name: str | None = Field(default="grpo-dev", description="Experiment of the run.")
    run_name: str | None = Field(default="grpo-dev-logger", description="Name of the run.")
    tracking_uri: str | None = Field(
        default=None,
        description="Address of a server or of a database (sqlite:///mlflow.db); null: MLFLOW_TRACKING_URI, or "
        "without it a database in the run's folder, exp_NNN/mlflow/mlflow.db.",
    )
    artifact_location: str | None = Field(default=None, description="Place where a new experiment puts artifacts.")
    run_id: str | None = Field(default=None, description="Existing run to continue; null: a new one.")


class SwanlabConfig(Section):
    """SwanLab."""

    project: str | None = Field(default="grpo-dev", description="Project of the run.")
    name: str | None = Field(default="grpo-dev-logger", description="Name of the run.")


class LoggerConfig(Section):
    """Console, trackers and files; each run writes to its own folder log_dir/exp_NNN."""

    ignored: ClassVar[dict[str, str]] = {
        "gpu_monitoring": "machine metrics are not reported yet",
        "monitor_gpus": "machine metrics are not reported yet",
    }

    log_dir: str = Field(default="logs", description="Folder of all runs; a run makes exp_NNN below it.")
    num_val_samples_to_print: NonNegativeInt = Field(
        default=0, description="Validation conversations shown on the console."
    )
    save_trajectories: bool = Field(
        default=True, description="Write every rollout of a step to train_data_step<N>.jsonl."
    )
    wandb_enabled: bool = Field(default=False, description="Report to Weights & Biases.")
    tensorboard_enabled: bool = Field(default=False, description="Write TensorBoard files.")
    mlflow_enabled: bool = Field(default=False, description="Report to MLflow (extra `mlflow`).")
    swanlab_enabled: bool = Field(default=False, description="Report to SwanLab (extra `swanlab`).")
    wandb: WandbConfig = Field(default_factory=WandbConfig, description="Weights & Biases.")
    tensorboard: TensorboardConfig = Field(default_factory=TensorboardConfig, description="TensorBoard.")
    mlflow: MlflowConfig = Field(default_factory=MlflowConfig, description="MLflow.")
    swanlab: SwanlabConfig = Field(default_factory=SwanlabConfig, description="SwanLab.")
