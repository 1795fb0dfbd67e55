"""Sessions for tests: a counter as data, models that make folders, and checkpoints below a temporary folder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.runtime.saving import Savable
from nemo_rl.algorithms.runtime.session import Cadence, Resumable, Session, SessionParts
from nemo_rl.algorithms.runtime.throughput import Throughput
from nemo_rl.algorithms.runtime.validations import InTurn, Validation
from nemo_rl.config import CheckpointingConfig, LoggerConfig
from nemo_rl.data.streams.prompt_stream import DataExhausted
from nemo_rl.models.policy.workers.costs import PassCosts, WorkCount
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.logger import Logger


class Data:
    """A position that counts batches."""

    def __init__(self, length: int = 1000):
        self.position = 0
        self.length = length
        self.epoch = 0

    def next(self) -> None:
        if self.position == self.length:
            raise DataExhausted(f"the data ended after {self.length} batches")
        self.position += 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Policy:
    """A model whose checkpoint is its empty folders."""

    def save_checkpoint(
        self, weights_path: str, optimizer_path: str | None, tokenizer_path: str | None, consolidated: bool
    ) -> None:
        for path in (weights_path, optimizer_path, tokenizer_path):
            if path is not None:
                Path(path).mkdir(parents=True)


def session_parts(
    folder: Path,
    cadence: Cadence,
    source: Resumable,
    *,
    models: Mapping[str, Savable] | None = None,
    validate: Callable[[int], dict[str, float]] | None = None,
    validation: Validation | None = None,
    log_dir: Path | None = None,
    saves: bool = True,
    **checkpointing: Any,
) -> SessionParts:
    """Make parts whose checkpoints are in `folder/checkpoints` and whose metrics are in `log_dir/exp`.

    Args:
        folder: of the checkpoints.
        cadence: when to validate, save and stop.
        source: the training data.
        models: models to save; None: an empty one.
        validate: returns metrics, while training waits.
        validation: used instead of `validate`.
        log_dir: of the metrics; None: `folder`.
        saves: False: without checkpoints.
        **checkpointing: keys of the section.
    """
    config = CheckpointingConfig.build(checkpoint_dir=str(folder / "checkpoints"), **checkpointing)
    log_dir = log_dir or folder
    return SessionParts(
        cadence=cadence,
        logger=Logger(LoggerConfig.build(log_dir=str(log_dir)), log_dir / "exp"),
        checkpointing=config,
        checkpoints=CheckpointManager(config) if saves else None,
        models=models or {"policy": Policy()},
        source=source,
        validation=validation or (InTurn(validate) if validate else None),
        run_config=config,
        throughput=no_passes(),
    )


@dataclass
class Counted:
    """A model with a count of its passes."""

    work: WorkCount


def no_passes() -> Throughput:
    """Measure a model that makes no passes over rows."""
    return Throughput(Counted(WorkCount(lambda: PassCosts(None, None))), "float32", 1, 2, uses_gpu=False)


def start_session(parts: SessionParts) -> Session:
    """Start a session that continues from the newest checkpoint, if there is one."""
    latest = CheckpointManager(parts.checkpointing).get_latest_checkpoint_path()
    return Session(parts, None if latest is None else Path(latest), started_at=0.0)


def make_session(folder: Path, cadence: Cadence, source: Resumable, **options: Any) -> Session:
    """Start a session of `session_parts`."""
    return start_session(session_parts(folder, cadence, source, **options))


def train(session: Session, data: Data) -> list[int]:
    """Run all steps of a session; return their numbers."""
    steps = []
    with session:
        for step in session.steps():
            data.next()
            session.record({"loss": 1.0 / step, "global_valid_toks": 10.0})
            session.finish_step(step, num_prompts=4)
            steps.append(step)
    return steps
