"""Define the keys of `logger`: destinations of a run's metrics and samples.

Invariant: every tracker has a `<name>_enabled` switch and a section with its own keys.
"""

from typing import Annotated, ClassVar

from pydantic import Field

from nemo_rl.config.base.availability import OnlyWith
from nemo_rl.config.base.section import Section
from nemo_rl.config.base.value_types import Count, CountOrZero, Seconds

RECORDS_FOLDER = "steps"
"""Folder for the records of `record_steps`, in the log folder of a run."""


_TENSORBOARD = OnlyWith("tensorboard_enabled")

_MONITORS = OnlyWith("monitor_gpus")


class WandbConfig(Section):
    """Weights & Biases."""

    ignored: ClassVar[dict[str, str]] = {
        "log_nemo_gym_full_result_tables": "samples of every environment are in the run's log folder",
    }

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
    """Address of a server or a database (sqlite:///mlflow.db); null: MLFLOW_TRACKING_URI, or without it the database
    exp_NNN/mlflow/mlflow.db in the run's folder."""
    artifact_location: str | None = None
    """Place where a new experiment stores artifacts."""
    run_id: str | None = None
    """Existing run to continue; null: a new one."""


class SwanlabConfig(Section):
    """SwanLab."""

    project: str | None = "grpo-dev"
    """Project of the run."""
    name: str | None = "grpo-dev-logger"
    """Name of the run."""


class TrackioConfig(Section):
    """Trackio."""

    project: str = "grpo-dev"
    """Project of the run."""
    name: str | None = "grpo-dev-logger"
    """Name of the run; null: Trackio chooses one."""
    space_id: str | None = None
    """Space of the Hugging Face hub that shows the run; null: the run is kept in its own folder."""


class PrometheusConfig(Section):
    """The newest metrics for a Prometheus server."""

    enabled: bool = False
    """Serve http://<host>:<port>/metrics during the run."""
    host: str = "127.0.0.1"
    """Address on which to serve; 0.0.0.0: all addresses of this machine, for everyone who can reach it."""
    port: Annotated[int, Field(ge=0, le=65535)] = 9464
    """Port on which to serve; 0: a free port, which the log names."""


class GpuMonitoringConfig(Section):
    """Load of the machines, with logger.monitor_gpus."""

    collection_interval: Seconds = 10.0
    """Seconds between two readings of a node."""
    flush_interval: Seconds = 10.0
    """Seconds between two reports to the trackers."""


class LoggerConfig(Section):
    """Console, trackers and files of a run. The run's folder is log_dir/exp_NNN."""

    log_dir: str = "logs"
    """Folder of all runs. A run makes exp_NNN in it."""
    num_val_samples_to_print: CountOrZero = 0
    """Number of validation conversations shown on the console."""
    num_answers_on_terminal: CountOrZero = 2
    """Sampled answers of a training step shown with their rewards, one line each, if the console is a terminal."""
    answers_on_terminal_period: Count = 10
    """Number of steps between two displays of answers."""
    save_trajectories: bool = True
    """Write all rollouts of a step to train_data_step<N>.jsonl."""
    record_steps: bool = False
    """Record the first step and each step after a checkpoint in exp_NNN/steps, for `nemo_rl replay`."""
    record_modules: Annotated[bool, OnlyWith("record_steps")] = False
    """Also record the output of each module, so that a replay can name the first module that differs."""
    monitor_gpus: bool = True
    """Report processors, memory and GPUs of every node under ray/."""
    gpu_monitoring: Annotated[GpuMonitoringConfig, _MONITORS] = Field(default_factory=GpuMonitoringConfig)
    """Load of the machines, with monitor_gpus."""
    wandb_enabled: bool = False
    """Report to Weights & Biases."""
    tensorboard_enabled: bool = False
    """Write TensorBoard files."""
    mlflow_enabled: bool = False
    """Report to MLflow (extra `mlflow`)."""
    swanlab_enabled: bool = False
    """Report to SwanLab (extra `swanlab`)."""
    trackio_enabled: bool = False
    """Report to Trackio (extra `trackio`)."""
    wandb: Annotated[WandbConfig, OnlyWith("wandb_enabled")] = Field(default_factory=WandbConfig)
    """Weights & Biases."""
    tensorboard: Annotated[TensorboardConfig, _TENSORBOARD] = Field(default_factory=TensorboardConfig)
    """TensorBoard."""
    mlflow: Annotated[MlflowConfig, OnlyWith("mlflow_enabled")] = Field(default_factory=MlflowConfig)
    """MLflow."""
    swanlab: Annotated[SwanlabConfig, OnlyWith("swanlab_enabled")] = Field(default_factory=SwanlabConfig)
    """SwanLab."""
    trackio: Annotated[TrackioConfig, OnlyWith("trackio_enabled")] = Field(default_factory=TrackioConfig)
    """Trackio."""
    prometheus: PrometheusConfig = Field(default_factory=PrometheusConfig)
    """The newest metrics for a Prometheus server."""
