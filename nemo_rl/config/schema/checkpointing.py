"""Define the keys of `checkpointing`: times and places of saves, and which checkpoints are kept.

Invariant: a metric name always begins with `val:` or `train:`.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from nemo_rl.config.base.availability import Only
from nemo_rl.config.base.names import VALIDATION_METRICS
from nemo_rl.config.base.section import Section
from nemo_rl.config.base.value_types import Amount, Count, Seconds


class CheckpointingConfig(Section):
    """Saving and keeping checkpoints. A run that is started again resumes from the newest one."""

    later: ClassVar[dict[str, str]] = {
        "ft_save_period": "extra crash-recovery saves",
        "ft_keep_latest_k": "extra crash-recovery saves",
        "pretrained_checkpoint": "starting from a Megatron checkpoint (policy.model_name names a Hugging Face model)",
    }
    ignored: ClassVar[dict[str, str]] = {
        "is_peft": "trained weights are saved: only adapters where only they are trained",
        "peft_config": "trained weights are saved: only adapters where only they are trained",
        "model_cache_dir": "models are cached where Hugging Face caches them",
        "model_repo_id": "the model is named by policy.model_name",
    }

    enabled: bool = True
    """Save checkpoints."""
    checkpoint_dir: str = "results/grpo"
    """Folder of the checkpoints, each in a folder step_<N>."""
    metric_name: str | None = "val:accuracy"
    """Metric that ranks checkpoints, as val:<name> or train:<name>; null: newer checkpoints rank higher."""
    higher_is_better: bool = True
    """Whether a larger metric is better."""
    keep_top_k: Count | None = 3
    """Number of best checkpoints that are kept besides the newest one; null: all."""
    save_period: Amount = 10
    """Number of steps between two saves."""
    checkpoint_must_save_by: Annotated[str, Field(pattern=r"^\d+:\d\d:[0-5]\d:[0-5]\d$")] | None = None
    """Wall-clock limit DD:HH:MM:SS after which the run saves and ends; null: no limit."""
    signal_grace_s: Seconds = 600.0
    """Seconds after SIGTERM, SIGINT, SIGHUP or SIGUSR1 within which the running step and its checkpoint must be
    finished. After that, the run ends without a checkpoint."""
    save_optimizer: bool = True
    """Store the optimizer state. Without it, a resumed run starts with a new optimizer."""
    allow_changed: list[str] = Field(default_factory=list)
    """Keys or sections that may differ from the configuration of the checkpoint from which a run resumes, for example
    [data.train, grpo.seed]. policy.optimizer also allows a resume without optimizer state."""
    is_async: bool = False
    """Copy the state of the ranks to host memory, and write it while training continues. A checkpoint is valid when it
    is complete."""
    save_consolidated: bool = False
    """Also write policy/weights/model/consolidated: a self-contained folder with the model in policy.precision and its
    tokenizer."""
    model_save_format: Annotated[Literal["safetensors", "torch_save"], Only(("safetensors",), "torch_save")] | None = (
        "safetensors"
    )
    """File format of the weights; null means safetensors."""

    @field_validator("metric_name")
    @classmethod
    def _has_side(cls, metric: str | None) -> str | None:
        if metric is None:
            return None
        side, _, name = metric.partition(":")
        if side in ("val", "train") and name:
            return metric
        bare, usual = metric.rpartition(":")[2].removeprefix("val_"), str(cls.model_fields["metric_name"].default)
        sampled = usual.removeprefix("val:") in VALIDATION_METRICS
        raise PydanticCustomError(
            "metric_name",
            "a metric is written val:<name> or train:<name>, for example {example}",
            {"example": f"val:{bare}" if sampled and bare in VALIDATION_METRICS else usual},
        )

    def allows(self, key: str) -> bool:
        """Return whether `allow_changed` names a key or a section that contains it."""
        return any(key == allowed or key.startswith(f"{allowed}.") for allowed in self.allow_changed)
