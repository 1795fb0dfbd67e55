"""Log a run's metrics to the console, a file and the enabled trackers.

The backends are in `utils.log_backends`. Invariant: every backend gets the same numbers under the same names, and a
file or tracker gets each group of metrics of a step once, however often the step is trained.
"""

import importlib
import io
import logging
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, override

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from nemo_rl.config import LoggerConfig
from nemo_rl.config.rules.trackers import check_trackers
from nemo_rl.files.writing import OptionalOutput, write_atomically
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.log_backends.console import ConsoleLogger
from nemo_rl.utils.log_backends.jsonl import JsonlLogger, to_line
from nemo_rl.utils.log_backends.tracker import LoggerInterface, Metrics, flatten_dict, without_secrets

if TYPE_CHECKING:
    from nemo_rl.utils.log_backends.mlflow import MLflowLogger
    from nemo_rl.utils.log_backends.swanlab import SwanlabLogger
    from nemo_rl.utils.log_backends.tensorboard import TensorboardLogger
    from nemo_rl.utils.log_backends.trackio import TrackioLogger
    from nemo_rl.utils.log_backends.wandb import WandbLogger

__all__ = [
    "Logger",
    "LoggerInterface",
    "MLflowLogger",
    "SwanlabLogger",
    "TensorboardLogger",
    "TrackioLogger",
    "WandbLogger",
    "flatten_dict",
    "get_next_experiment_dir",
    "log_container_init_timing",
    "print_message_log_samples",
]

logger = logging.getLogger(__name__)

_IMPORTED_AT = time.monotonic()

_EXPERIMENT = re.compile(r"^exp_(\d+)$")
_PANEL_WIDTH = 100
_TRACKERS = {
    "tensorboard": "TensorboardLogger",
    "wandb": "WandbLogger",
    "mlflow": "MLflowLogger",
    "swanlab": "SwanlabLogger",
    "trackio": "TrackioLogger",
}


def make_log_dir(path: str | Path) -> Path:
    """Create the folder of all runs' logs and return it.

    Raises:
        ConfigError: the folder cannot be created or written.
    """
    folder = Path(path).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"logger.log_dir={str(path)!r} cannot be written ({error.strerror}: {error.filename or folder}). "
            "Choose a folder that this user may write."
        ) from error
    return folder


def get_next_experiment_dir(base_log_dir: str | Path) -> str:
    """Create and return `<base_log_dir>/exp_NNN`, where NNN is one more than the highest existing number.

    Raises:
        ConfigError: the folder cannot be created or written.
    """
    base = make_log_dir(base_log_dir)
    numbers = [int(m.group(1)) for m in (_EXPERIMENT.match(e.name) for e in base.iterdir()) if m]
    number = max(numbers, default=0)
    while True:
        number += 1
        folder = base / f"exp_{number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return str(folder)


def log_container_init_timing() -> None:
    """Log the start-up time of the program, from the first import of this file to this call.

    NeMo RL's containers make virtual environments at start and report that time; this library does not.
    """
    logger.info("%.1f s since the library was imported.", time.monotonic() - _IMPORTED_AT)


class Logger(LoggerInterface):
    """Log to all backends, with a warning instead of an error if a backend cannot be written.

    Args:
        log_dir: this run's folder; None takes `cfg.log_dir`.
        total_steps: length of the console's progress bar.

    Raises:
        ConfigError: a tracker is enabled and its library is not installed.
    """

    def __init__(self, cfg: LoggerConfig, log_dir: str | Path | None = None, total_steps: int | None = None):
        self.log_dir = Path(cfg.log_dir if log_dir is None else log_dir)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._backends = make_backends(cfg, self.log_dir, total_steps)
        self._outputs = [OptionalOutput(type(b).__name__, b.failures) for b in self._backends]
        self._files = OptionalOutput(f"Samples in {self.log_dir}")
        self.train_step = 0
        """Newest training step whose metrics were logged."""
        self._turns = [threading.Lock() for _ in self._backends]
        self._logged: set[tuple[str, int]] = set()
        self._repeated: frozenset[tuple[str, int]] = frozenset()

    def go_back(self) -> None:
        """Prepare for repeated steps: metrics that were logged already go to the console only."""
        self._repeated = frozenset(self._logged)

    @override
    def log_metrics(
        self, metrics: Metrics, step: int, prefix: str = "", step_metric: str | None = None, step_finished: bool = False
    ) -> None:
        if prefix == "train":
            self.train_step = step
        is_new = (prefix, step) not in self._repeated
        self._logged.add((prefix, step))

        def log(backend: LoggerInterface) -> None:
            if is_new or backend.shows_repeated:
                backend.log_metrics(metrics, step, prefix, step_metric, step_finished)

        self._on_all(log)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log hyperparameters with secrets replaced, because trackers show them to others."""
        shown = without_secrets(params)
        self._on_all(lambda backend: backend.log_hyperparams(shown))

    def log_batched_dict_as_jsonl(self, to_log: Mapping[str, Any], filename: str) -> None:
        """Write a batch to `<log_dir>/<filename>`, one line per sample.

        Args:
            to_log: tensors, arrays or lists with a common first axis.
            filename: name of the file in this run's folder.

        Raises:
            ValueError: the first axes differ.
        """
        columns = dict(to_log)
        sizes = {name: len(column) for name, column in columns.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"The columns of {filename} differ in length: {sizes}.")
        num_rows = next(iter(sizes.values()), 0)
        rows = ({name: column[row] for name, column in columns.items()} for row in range(num_rows))
        with self._files.attempt():
            write_atomically(self.log_dir / filename, (to_line(row) + "\n" for row in rows))

    def log_string_list_as_jsonl(self, to_log: Sequence[str], filename: str) -> None:
        """Write texts that are JSON already to `<log_dir>/<filename>`, one per line."""
        with self._files.attempt():
            write_atomically(self.log_dir / filename, (text + "\n" for text in to_log))

    def close(self) -> None:
        """Close all backends."""
        self._on_all(lambda backend: backend.close())

    def finish(self) -> None:
        """Close all backends as `close` does."""
        self.close()

    def _on_all(self, log: Callable[[LoggerInterface], None]) -> None:
        # The machine monitor logs from its own thread. Each backend has its own lock, so while one thread waits for a
        # slow backend, the other can still log to the backends before it.
        for backend, output, turn in zip(self._backends, self._outputs, self._turns, strict=True):
            with turn, output.attempt():
                log(backend)


def make_backends(cfg: LoggerConfig, log_dir: Path, total_steps: int | None) -> list[LoggerInterface]:
    """Build the console, the metrics file and every enabled tracker. If one fails, close the others.

    Raises:
        ConfigError: a tracker is enabled and its library or login is missing, or metrics cannot be served.
    """
    check_trackers(cfg)
    backends: list[LoggerInterface] = []
    with ExitStack() as undo:

        def add(backend: LoggerInterface) -> None:
            backends.append(backend)
            undo.callback(_close_failed, backend)

        add(ConsoleLogger(total_steps))
        add(JsonlLogger(log_dir))
        if cfg.prometheus.enabled:  # before the trackers, which may keep a step waiting
            add(_tracker_class("prometheus", "PrometheusLogger")(cfg.prometheus))
        for name, class_name in _TRACKERS.items():
            if getattr(cfg, f"{name}_enabled"):
                folder = log_dir / name
                folder.mkdir(exist_ok=True)
                add(_tracker_class(name, class_name)(getattr(cfg, name), folder))
        undo.pop_all()
    return backends


def _close_failed(backend: LoggerInterface) -> None:
    """Close a backend after another one failed to start. Only the error of that one is reported."""
    with suppress(*backend.failures):
        backend.close()


def _tracker_class(name: str, class_name: str) -> Any:
    """Import one tracker's file, which imports the tracker's library."""
    return getattr(importlib.import_module(f"nemo_rl.utils.log_backends.{name}"), class_name)


def __getattr__(name: str) -> Any:
    """Return a tracker's class under this module's name, without importing its library early."""
    for module, class_name in _TRACKERS.items():
        if class_name == name:
            return _tracker_class(module, class_name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def print_message_log_samples(
    message_logs: Sequence[Sequence[Mapping[str, Any]]],
    rewards: Sequence[float],
    num_samples: int = 5,
    step: int = 0,
) -> None:
    """Show the conversations with the best and worst rewards on the console.

    Args:
        message_logs: one message log for each sample.
        rewards: one reward for each sample.
        num_samples: number of conversations to show; 0 shows nothing.
        step: training step, for the heading.

    Raises:
        ValueError: the numbers of rewards and message logs differ.
    """
    if len(message_logs) != len(rewards):
        raise ValueError(f"{len(message_logs)} message logs, but {len(rewards)} rewards.")
    by_reward = sorted(range(len(rewards)), key=lambda row: rewards[row], reverse=True)
    num_shown = min(num_samples, len(by_reward))
    num_worst = num_shown // 2
    for row in by_reward[: num_shown - num_worst] + by_reward[len(by_reward) - num_worst :]:
        logger.info("step %d, sample %d\n%s", step, row, _render(message_logs[row], float(rewards[row])))


def _render(message_log: Sequence[Mapping[str, Any]], reward: float) -> str:
    """Render one conversation as framed text, without interpreting markup in it."""
    turns = [Text(f"{message['role']}: {message['content']}") for message in message_log]
    page = io.StringIO()
    Console(file=page, width=_PANEL_WIDTH).print(Panel(Group(*turns), title=f"reward {reward:g}"))
    return page.getvalue().rstrip()
