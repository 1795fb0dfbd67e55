"""Run an example script as a user starts it, and read its log, metrics and processes."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED_DATA = REPOSITORY / "../shared/data"

SendSignal = Callable[[int], str]
StartExample = Callable[..., "ExampleRun"]
Metrics = dict[tuple[str, int, str], float]


_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


@dataclass
class ExampleRun:
    """One process of an example script."""

    process: subprocess.Popen[bytes]
    log_path: Path
    log_dir: Path
    _seen: list[psutil.Process] = field(default_factory=list)

    def log(self) -> str:
        """The output so far; lines that were cut for their length are joined."""
        return re.sub(r"\n {11}(?=\S)", " ", self.log_path.read_text(errors="replace"))

    def longest_line(self) -> str:
        """Length of the longest line on the console."""
        return max(self.log_path.read_text(errors="replace").splitlines(), key=len, default="")

    def wait_for(self, pattern: str, timeout_s: float = 400) -> None:
        """Wait until the log matches; fail early if the process has ended."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if re.search(pattern, self.log()):
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"{pattern!r} did not appear. The log ends:\n{self.log()[-3000:]}")

    def finish(self, timeout_s: float = 600) -> int:
        """Wait for the end and return the exit status."""
        return self.process.wait(timeout_s)

    def processes(self, *titles: str) -> list[psutil.Process]:
        """Return the descendants whose title starts with one of `titles`; without titles, all of them."""
        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self._seen += family
        return [p for p in family if _title(p).startswith(titles or "")]

    def kill(self, *titles: str, within_s: float = 20) -> int:
        """Kill one worker with SIGKILL and return its pid. Ray changes process titles from call to call."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            for victim in self.processes(*titles):
                victim.kill()
                return victim.pid
        raise AssertionError(f"No process is titled {titles}: {[_title(p) for p in self.processes()]}")

    def survivors(self, within_s: float = 20) -> list[str]:
        """Return the processes seen earlier that still run after `within_s` seconds.

        Ray's own agents are left out: they poll for their raylet once a minute.
        """
        end = time.monotonic() + within_s
        while True:
            alive = [p for p in set(self._seen) if _runs(p) and not _title(p).startswith(_AGENTS)]
            if not alive or time.monotonic() > end:
                return [_title(p) for p in alive]
            time.sleep(0.2)


class ExampleRuns:
    """Runs of example scripts in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: list[ExampleRun] = []

    def start(
        self,
        script: str,
        config: str,
        *overrides: str,
        logs: str = "logs",
        process_group: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> ExampleRun:
        log_dir = self._folder / logs
        log_path = self._folder / f"console_{len(self._runs)}.log"
        command = [sys.executable, str(REPOSITORY / "examples" / script)]
        command += ["--config", str(REPOSITORY / "examples/configs" / config)]
        command += [f"logger.log_dir={log_dir}", *overrides]
        with log_path.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                # The repository comes first, so that another installation of the library is not tested instead.
                env=run_environment() | {"PYTHONPATH": f"{REPOSITORY}:{self._folder}"} | dict(environment or {}),
                process_group=process_group,
            )
        self._runs.append(ExampleRun(process, log_path, log_dir))
        return self._runs[-1]

    def close(self) -> None:
        """End all processes that still run."""
        for run in self._runs:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()


@dataclass(frozen=True)
class GRPOExample:
    """A finished run of the GRPO example: its metrics, its last checkpoint, and the longest line of its console."""

    metrics: Metrics
    checkpoint: Path
    longest_line: str


def finished(start: StartExample, script: str, config: str, overrides: tuple[str, ...], folder: Path) -> Metrics:
    """Return the metrics of an undisturbed run."""
    run = start(script, config, *overrides, f"checkpointing.checkpoint_dir={folder}/checkpoints")
    assert run.finish() == 0, run.log()[-3000:]
    return of_training(read_metrics(run.log_dir))


def killed_and_resumed(
    start: StartExample, script: str, config: str, overrides: tuple[str, ...], folder: Path, steps: int
) -> Metrics:
    """Return the metrics of a run that was killed in its last step and started again.

    The steps after the last checkpoint, which both runs made, must be equal bit for bit, and no process may
    survive the kill.
    """
    overrides += (f"checkpointing.checkpoint_dir={folder}/checkpoints",)
    killed = start(script, config, *overrides)
    killed.wait_for(f"step {steps - 1}/{steps}")
    killed.processes()
    killed.process.kill()
    killed.finish()
    assert killed.survivors() == []
    uninterrupted = of_training(read_metrics(killed.log_dir))

    resumed = start(script, config, *overrides, logs="resumed")
    assert resumed.finish() == 0, resumed.log()[-3000:]
    assert "Resuming from" in resumed.log()
    assert "has ended" not in resumed.log(), "the end of a run is no death of its Ray"
    metrics = of_training(read_metrics(resumed.log_dir))
    first = min(step for _, step, _ in metrics)
    repeated = {key: value for key, value in uninterrupted.items() if key[1] >= first}
    assert {("train", step) for step in range(first, steps - 1)} <= {key[:2] for key in repeated}
    assert first < steps - 2
    assert {key: metrics[key] for key in repeated} == repeated
    return uninterrupted | metrics


def interrupted_and_resumed(
    start: StartExample, script: str, config: str, overrides: tuple[str, ...], folder: Path, send: SendSignal
) -> Metrics:
    """Return the metrics of a run that got a signal after two steps, saved a checkpoint and was started again.

    Args:
        start: function that starts an example.
        script: name of the example.
        config: its configuration.
        overrides: overrides of both starts.
        folder: folder of checkpoints.
        send: function that sends the signal to the process and returns its name.
    """
    overrides += (f"checkpointing.checkpoint_dir={folder}/checkpoints",)
    first = start(script, config, *overrides, logs="interrupted", process_group=0)
    first.wait_for("step 2/")
    first.processes()
    name = send(first.process.pid)
    assert first.finish(120) == 75, first.log()[-3000:]
    assert f"{name}: the run ends after this step with a checkpoint, within 600 s" in first.log()
    last = re.search(rf"RunInterruptedError: {name} was received. The checkpoint of step (\d+) is", first.log())
    assert last is not None and (folder / f"checkpoints/step_{last.group(1)}").exists()
    assert first.survivors() == []

    second = start(script, config, *overrides, logs="resumed")
    assert second.finish() == 0, second.log()[-3000:]
    before, after = (of_training(read_metrics(run.log_dir)) for run in (first, second))
    assert not before.keys() & after.keys()
    return before | after


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def read_metrics(log_dir: Path) -> Metrics:
    """Read all metrics below a log folder by (prefix, step, name); values of a later run replace earlier ones."""
    values: Metrics = {}
    for path in sorted(log_dir.glob("exp_*/metrics.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            for name, value in row["metrics"].items():
                values[row["prefix"], row["step"], name] = value
    return values


def check_agent_steps(run: ExampleRun, steps: int) -> Metrics:
    """Check that all tokens of agents are those of the policy, and that no program failed."""
    metrics = read_metrics(run.log_dir)
    for step in range(1, steps + 1):
        assert metrics["train", step, "num_reward_errors"] == 0, run.log()[-3000:]
        if not metrics.get(("train", step, "max_trajectory_age")):  # else it is not measured
            assert metrics["train", step, "token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
        assert metrics["train", step, "calls_per_sample"] >= 1
    return metrics


def of_training(metrics: Metrics) -> Metrics:
    """Return only what training computes; wall-clock times differ between runs."""
    return {
        key: value for key, value in metrics.items() if key[0] in ("train", "validation") and not key[2].endswith("_s")
    }


def run_environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTEST_"))}
    return kept | {"HF_HUB_OFFLINE": "1"}


def run_script(folder: Path, script: str, *arguments: str) -> tuple[int, str]:
    """Run an example script to its end in a folder; return its status and output."""
    command = [sys.executable, str(REPOSITORY / "examples" / script), *arguments]
    done = subprocess.run(command, cwd=folder, env=run_environment(), capture_output=True, text=True, timeout=280)
    return done.returncode, done.stdout + done.stderr


def run_eval(folder: Path, *overrides: str) -> tuple[int, str]:
    """Call `run_script` for the evaluation on CPUs."""
    return run_script(folder, "run_eval.py", "--config", "examples/configs/evals/eval_cpu.yaml", *overrides)
