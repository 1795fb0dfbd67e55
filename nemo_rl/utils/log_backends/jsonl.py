"""Write metrics and rows as JSON lines, which can be read without a tracker.

`metrics.jsonl` has one line per group of metrics: `{"step", "prefix", "metrics", "time"}`, the time in seconds since
1970. Invariant: numbers keep full precision, and every line is strict JSON (null stands for a number that is not
finite).
"""

import errno
import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, override

from nemo_rl.utils.log_backends.tracker import LoggerInterface, Metrics, to_scalars

METRICS_FILE = "metrics.jsonl"


class JsonlLogger(LoggerInterface):
    """Append metrics to `metrics.jsonl` in lines that are written completely or not at all."""

    def __init__(self, log_dir: str | Path):
        self._file = (Path(log_dir) / METRICS_FILE).open("ab", buffering=0)

    @override
    def log_metrics(
        self, metrics: Metrics, step: int, prefix: str = "", step_metric: str | None = None, step_finished: bool = False
    ) -> None:
        numbers = to_scalars(metrics)
        row = {"step": step, "prefix": prefix, "metrics": numbers, "time": round(time.time(), 3)}
        line = (to_line(row) + "\n").encode()
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        except OSError:
            with suppress(OSError):
                self._file.truncate(end)
            raise

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Do nothing, because the configuration has its own file in the run's folder."""

    @override
    def close(self) -> None:
        self._file.close()


def to_line(row: Mapping[str, Any]) -> str:
    """Format a row as one strict JSON line, with tensors and arrays as lists."""
    return json.dumps(_plain(row), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
