"""Hold the result of a run that a program started: its metrics, its folder and its model.

Invariant: a finished run holds numbers and paths only; no process and no file of the run is open.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, override

from nemo_rl.config import CheckpointingConfig
from nemo_rl.config.base.names import MACHINE_METRICS
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.log_backends.jsonl import METRICS_FILE


class RunMetrics(Mapping[str, float]):
    """Metrics of a run: `metrics["validation/accuracy"]` is the last value, `metrics.columns` has all values.

    Args:
        columns: `step`, and a column for each metric, with None at steps without it.
    """

    def __init__(self, columns: Mapping[str, list[Any]]) -> None:
        self.columns: dict[str, list[Any]] = dict(columns)
        """Values by metric and step, for `pandas.DataFrame(run.metrics.columns)`."""
        self._last = {
            name: next(value for value in reversed(column) if value is not None)
            for name, column in self.columns.items()
            if name != "step" and any(value is not None for value in column)
        }

    @classmethod
    def of_values(cls, values: Mapping[str, float]) -> Self:
        """Return metrics with one value each."""
        return cls({"step": [0], **{name: [value] for name, value in values.items()}})

    @classmethod
    def of_logs(cls, log_dir: str | Path) -> Self:
        """Read the metrics of a run and of the earlier runs that it resumed, all in one folder of logs."""
        rows: dict[int, dict[str, float]] = {}
        files = Path(log_dir).glob(f"exp_*/{METRICS_FILE}")
        for file in sorted(files, key=lambda file: (len(file.parent.name), file.parent.name)):
            for line in file.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                if row["prefix"] == MACHINE_METRICS:
                    continue
                prefix = f"{row['prefix']}/" if row["prefix"] else ""
                values = rows.setdefault(row["step"], {})
                values |= {f"{prefix}{name}": value for name, value in row["metrics"].items()}
        steps = sorted(rows)
        names = dict.fromkeys(name for step in steps for name in rows[step])
        return cls({"step": list(steps), **{name: [rows[step].get(name) for step in steps] for name in names}})

    @override
    def __getitem__(self, name: str) -> float:
        return self._last[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._last)

    @override
    def __len__(self) -> int:
        return len(self._last)

    def __repr__(self) -> str:
        return f"RunMetrics({len(self)} metrics, {len(self.columns['step'])} steps)"


@dataclass(frozen=True)
class FinishedRun:
    """Run that has ended."""

    metrics: RunMetrics
    """Last values by name, and all values as columns."""
    folder: Path
    """Folder of the run: `logs`, `checkpoints` and `data`; `nemo_rl report FOLDER/logs` shows it."""
    model: Path | None
    """Folder of the trained model, for `AutoModelForCausalLM.from_pretrained`, vLLM or the next run. None if no
    checkpoint was written."""

    @classmethod
    def of_folders(cls, folder: Path, log_dir: str | Path, checkpointing: CheckpointingConfig) -> Self:
        """Read a run from its folders."""
        newest = CheckpointManager(checkpointing).get_latest_checkpoint_path() if checkpointing.enabled else None
        model = None if newest is None else Path(newest) / "policy" / "weights" / "model"
        return cls(RunMetrics.of_logs(log_dir), folder, model if model is not None and model.is_dir() else None)
