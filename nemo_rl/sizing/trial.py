"""Take a few real steps of a run in a separate process, and time them.

`python -m nemo_rl.sizing.trial PARENT ALGORITHM FILE [key=value ...]` is that process; it ends with PARENT, the process
that waits for it. Invariant: a trial writes only below its own temporary folder, and nothing of it is left when it
ends.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from nemo_rl.config import LoggerConfig
from nemo_rl.config.loading.algorithms import ALGORITHMS
from nemo_rl.files.regular_file import read_bytes
from nemo_rl.host.child_process import die_with_parent
from nemo_rl.host.processes import descendants, end_descendants
from nemo_rl.launch.command_line import launch
from nemo_rl.utils.errors import NemoRLError
from nemo_rl.utils.log_backends.jsonl import METRICS_FILE

_POLL_S = 0.1
_TICKS = os.sysconf("SC_CLK_TCK")
_LAST_LINES = 15


@dataclass(frozen=True)
class Steps:
    """Timed steps."""

    wall: Sequence[float]
    """Seconds of each step after the first."""
    processor: float
    """Processor seconds of all processes of the run for each of these steps, on average."""

    @property
    def typical(self) -> float:
        """Median of the steps' seconds."""
        return median(self.wall)


def quiet_overrides(algorithm: str, steps: int, folder: Path) -> list[str]:
    """Return overrides that leave only steps of a run: no validation, checkpoints or trackers; logs go to a folder."""
    trackers = [name for name in LoggerConfig.model_fields if name.endswith("_enabled")]
    others = ("prometheus.enabled", "record_steps", "record_modules", "monitor_gpus")
    off = [f"logger.{name}=false" for name in (*trackers, *others)]
    no_validation = [f"{algorithm}.val_period=0", f"{algorithm}.val_at_start=false", f"{algorithm}.val_at_end=false"]
    written = [f"logger.log_dir={folder}", "checkpointing.enabled=false"]
    return [f"{algorithm}.max_num_steps={steps}", *no_validation, *written, *off]


def take_steps(algorithm: str, file: Path, overrides: Sequence[str], steps: int, deadline_s: float) -> Steps:
    """Take a first step, and then timed ones.

    Args:
        algorithm: name of the algorithm.
        file: configuration of the run.
        overrides: changes of the configuration.
        steps: number of timed steps.
        deadline_s: seconds after which the trial is ended.

    Raises:
        NemoRLError: the run failed or took too long; the message has its last lines.
    """
    with tempfile.TemporaryDirectory(prefix="nemo_rl_size_") as name:
        folder = Path(name)
        quiet = quiet_overrides(algorithm, steps + 1, folder / "logs")
        program = [sys.executable, "-P", "-m", "nemo_rl.sizing.trial", str(os.getpid())]
        with (folder / "output").open("wb") as output:
            command = [*program, algorithm, str(file), *overrides, *quiet]
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            processor = _watch(process, folder / "logs", steps + 1, time.monotonic() + deadline_s)
            is_late = process.poll() is None
        finally:
            if process.poll() is None:
                end_descendants(process.pid)
                process.kill()
                process.wait()
        wall = step_seconds(folder / "logs")
        if processor is not None and len(wall) > steps and not process.returncode:
            return Steps(wall[1:], processor / steps)
        done = f"{len(wall)} of {steps + 1} steps"
        why = f"ended with exit status {process.returncode} after {done}"
        if is_late:
            why = f"was ended after {deadline_s:g} s, with {done}"
        elif not process.returncode:
            why = f"took {done}: the run is too short. Lower --steps"
        told = read_bytes(folder / "output").decode(errors="replace").splitlines()[-_LAST_LINES:]
        raise NemoRLError("\n".join([f"a trial with {' '.join(overrides) or 'own sizes'} {why}.", *told]))


def _watch(process: "subprocess.Popen[bytes]", logs: Path, steps: int, deadline: float) -> float | None:
    """Wait for the end; return the processor seconds between the first and the last step, None without a step."""
    first = last = None
    used: dict[int, float] = {}
    while process.poll() is None and time.monotonic() < deadline:
        used |= processor_seconds(process.pid)  # the workers of the last step may have ended already
        done = len(step_seconds(logs))
        if done >= 1 and first is None:
            first = sum(used.values())
        if done >= steps and last is None:
            last = sum(used.values())
        time.sleep(_POLL_S)
    return None if first is None else (last or sum(used.values())) - first


def step_seconds(logs: Path) -> list[float]:
    """Return the seconds of the steps that a run has logged so far."""
    found: list[float] = []
    for file in logs.glob(f"*/{METRICS_FILE}"):
        for line in file.read_text(encoding="utf-8").split("\n")[:-1]:
            row: dict[str, Any] = json.loads(line)
            if row["prefix"] == "timing/train" and "total_step_time" in row["metrics"]:
                found.append(row["metrics"]["total_step_time"])
    return found


def processor_seconds(pid: int) -> dict[int, float]:
    """Return the processor seconds that a process and each running process below it have used, by process."""
    found = {}
    for each in (pid, *descendants(pid)):
        with suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            found[each] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found


def main() -> int:
    """Run the process of a trial."""
    parent, algorithm, file, *overrides = sys.argv[1:]
    die_with_parent(int(parent))

    def train(config: Any) -> None:
        module = importlib.import_module(f"nemo_rl.algorithms.{algorithm}")
        with module.setup(config) as run:
            getattr(module, f"{algorithm}_train")(run)

    return launch("Take the steps of a trial.", Path(file), ALGORITHMS[algorithm], train, overrides)


if __name__ == "__main__":
    sys.exit(main())
