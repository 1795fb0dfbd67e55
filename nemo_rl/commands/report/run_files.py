"""Read the files that a run leaves in its log folder: configuration, record, metrics and samples.

Invariant: files are only read. If a file is missing or damaged, only its part of the page is omitted.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.algorithms.setup.run_record import RECORD_FILE, start_of_process
from nemo_rl.files.regular_file import open_regular, read_bytes, read_text
from nemo_rl.utils.errors import DataError
from nemo_rl.utils.log_backends.jsonl import METRICS_FILE

CONFIG_FILE = "config.yaml"
TRAINING = "train"
"""Prefix of the first line of each training step in the metrics."""
_STEPS = ("max_num_steps", "max_num_epochs")
_NOT_ALGORITHMS = (
    "policy",
    "data",
    "env",
    "logger",
    "checkpointing",
    "cluster",
    "loss_fn",
    "teacher",
    "value",
    "value_loss_fn",
    "generation",
)

_ROWS_OF_PROGRAM = re.compile(r"^.*/data/((?:rows|validation)-[0-9a-f]{12}\.jsonl)$")


@dataclass(frozen=True)
class RunFiles:
    """Files of one run."""

    folder: Path
    """Log folder of the run, `exp_NNN`."""
    earlier: tuple["RunFiles", ...] = ()
    """Run that this run continued, from the first one on, each with an empty `earlier`."""

    @property
    def parts(self) -> tuple["RunFiles", ...]:
        """All folders of the run in the order in which they were written, each as a separate run."""
        return (*self.earlier, replace(self, earlier=()))

    @property
    def name(self) -> str:
        """Name of the run: its folder with the parent, such as `logs/exp_001`."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    @cached_property
    def config(self) -> dict[str, Any]:
        """Resolved configuration, which is empty if the file is missing or damaged."""
        try:
            tree = yaml.safe_load(read_text(self.folder / CONFIG_FILE))
        except (OSError, UnicodeError, yaml.YAMLError):
            return {}
        return tree if isinstance(tree, dict) else {}

    @property
    def flat_config(self) -> dict[str, Any]:
        """The configuration by dotted keys.

        A file of rows that a run from Python has written is named without its folder, because the name is enough.
        """
        values = dict(_flat(self.config, "")) if self.config else {}
        return {
            key: _ROWS_OF_PROGRAM.sub(r"\1", value) if isinstance(value, str) else value
            for key, value in values.items()
        }

    @property
    def algorithm(self) -> str:
        """The section with the number of steps, such as `grpo`, or "" if there is none."""
        sections = (name for name in self.config if name not in _NOT_ALGORITHMS)
        return next((name for name in sections if set(_STEPS) & set(_section(self.config, name))), "")

    @property
    def max_steps(self) -> int | None:
        """Last step that the run was to train."""
        value = _section(self.config, self.algorithm).get("max_num_steps")
        return value if isinstance(value, int) and value > 0 else None

    @property
    def checkpoint_folder(self) -> str | None:
        """Folder of the run's checkpoints from the configuration, or None if the run saves none."""
        section = _section(self.config, "checkpointing")
        folder = section.get("checkpoint_dir") if section.get("enabled") else None
        return folder if isinstance(folder, str) else None

    @property
    def shares_devices(self) -> bool:
        """True if policy and engines compute on the same devices according to the configuration."""
        cluster, policy = _section(self.config, "cluster"), _section(self.config, "policy")
        placement = _section(_section(policy, "generation"), "colocated")
        own_machines = _section(placement, "resources").get("num_nodes") and cluster.get("num_nodes", 1) != 1
        return placement.get("enabled") is not False or (cluster.get("device") == "cpu" and not own_machines)

    def first_step(self) -> int | None:
        """Return the first training step that the run has logged, or None if there is none."""
        steps = (row.get("step") for row, _ in self.metric_rows() if row.get("prefix") == TRAINING)
        return next((step for step in steps if isinstance(step, int)), None)

    def continues(self, other: "RunFiles") -> bool:
        """Return whether the run resumed from a checkpoint of another run, which was started before it."""
        if self.checkpoint_folder is None or self.checkpoint_folder != other.checkpoint_folder:
            return False
        first = self.first_step()
        return other.record().get("status") != "finished" if first is None else first > 1

    def record(self) -> dict[str, Any]:
        """Return `run.json`, with the status "killed" if the process of a running run no longer exists."""
        try:
            record = read_json(read_bytes(self.folder / RECORD_FILE))
        except OSError:
            return {"status": "unknown"}
        if not isinstance(record, dict):
            return {"status": "unknown"}
        if record.get("status") == "running" and record.get("host") == os.uname().nodename and not _runs(record):
            record["status"] = "killed"
        return record

    def metric_rows(self, start: int = 0) -> Iterator[tuple[Mapping[str, Any], int]]:
        """Yield the complete lines of the metrics from a place in the file on, each with the place of the next line."""
        try:
            file = open_regular(self.folder / METRICS_FILE)
        except OSError:
            return
        with file:
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                start += len(line)
                row = read_json(line)
                if isinstance(row, dict) and isinstance(row.get("metrics"), dict):
                    yield row, start


def find_run(path: Path) -> RunFiles:
    """Return the run of a log folder: the run of `exp_NNN` itself, or the newest run in the folder of all runs.

    Raises:
        DataError: there is no run.
    """
    return find_runs(path)[-1]


def find_runs(path: Path) -> list[RunFiles]:
    """Return all runs of a folder, the first one first: an `exp_NNN`, their folder, or a folder of such folders.

    An `exp_NNN` that resumed from a checkpoint of an earlier one is part of the same run.

    Raises:
        DataError: there is no run.
    """
    if _is_run(path):
        return [RunFiles(path.resolve())]
    for patterns in (("exp_*",), ("*/exp_*", "*/*/exp_*")):
        folders = [folder for pattern in patterns for folder in path.glob(pattern) if _is_run(folder)]
        if folders:
            order = sorted(folders, key=lambda folder: (str(folder.parent), len(folder.name), folder.name))
            return _chained([RunFiles(folder.resolve()) for folder in order])
    raise DataError(
        f"{path} is no log folder of a run: neither it nor an exp_* in it has {METRICS_FILE}. Give the logger.log_dir "
        "of a run, one of its exp_*, or a folder with the log folders of several runs."
    )


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (METRICS_FILE, RECORD_FILE))


def _chained(runs: Sequence[RunFiles]) -> list[RunFiles]:
    """Join each resumed run to the run that wrote its checkpoint."""
    chains = list[RunFiles]()
    for run in runs:
        before = [chain for chain in chains if chain.folder.parent == run.folder.parent and run.continues(chain)]
        if before:
            chains.remove(before[-1])
            run = replace(run, earlier=before[-1].parts)
        chains.append(run)
    return chains


def read_json(line: bytes | str) -> Any:
    """Read a line of JSON, or return None if it is invalid, and replace numbers that are not finite (1e999) by None."""
    try:
        return json.loads(line, parse_constant=lambda _: None, parse_float=_finite_of)
    except (ValueError, RecursionError):
        return None


def finite(value: Any) -> float | None:
    """Return a number as a float, or None if the value is not a number, is not finite, or is too large."""
    try:
        return _finite_of(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None


def _finite_of(value: str | float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        if isinstance(value, float) and not math.isfinite(value):
            value = str(value)  # JSON has no infinity
        yield path, value if isinstance(value, (str, int, float, bool, type(None))) else json.dumps(value, default=str)
        return
    for key, inner in value.items():
        yield from _flat(inner, f"{path}.{key}" if path else str(key))


def _runs(record: Mapping[str, Any]) -> bool:
    """Return whether the process of a record may still run, or True if that is unknown."""
    pid, started = record.get("pid"), record.get("pid_started")
    return not isinstance(pid, int) or started is None or start_of_process(pid) == started
