"""Start runs of the GRPO example with a fault, and compare what they leave with an undisturbed run."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from example_runs import REPOSITORY, ExampleRun, ExampleRuns, Metrics, of_training, read_metrics
from matrix import MODES, Cell

STEPS = 6
FAULT_STEP = 4
"""The step of the fault; the newest checkpoint then is of step 2."""
HOLD_S = 30.0
"""Seconds that the phase of a stopped daemon takes: longer than it takes to notice the daemon."""
_INJECTOR = Path(__file__).parent / "injector"
OVERRIDES = (
    f"grpo.max_num_steps={STEPS}",
    "grpo.val_period=2",
    "grpo.val_at_start=false",
    "grpo.num_prompts_per_step=4",
    "grpo.max_val_samples=16",
    "grpo.val_batch_size=16",
    "policy.train_global_batch_size=32",
    "checkpointing.save_period=2",
    "cluster.ranks_per_node=2",
    "cluster.threads_per_rank=1",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.ranks_per_node=1",
    "cluster.timeouts.train_s=25",
    "cluster.timeouts.checkpoint_s=25",
    "cluster.timeouts.weight_sync_s=25",
    "cluster.timeouts.engine_silence_s=10",
    "cluster.timeouts.environment_s=10",
    "cluster.timeouts.rollout_runner_silence_s=10",
    "env.math.timeout_s=5",
    "logger.tensorboard_enabled=false",
)


@dataclass(frozen=True)
class FaultRuns:
    """Starts runs in one folder; all use the same checkpoints."""

    runs: ExampleRuns
    folder: Path

    def start(self, cell: Cell | None, mode: str, logs: str = "logs") -> ExampleRun:
        """Start a run in a mode of `MODES` that suffers the fault of a cell; None: none."""
        environment: dict[str, str] = {}
        if cell is not None:
            is_long = cell.victim in ("raylet", "gcs") and cell.signal == "SIGSTOP"
            hold_s = HOLD_S if is_long else 0.0
            environment = planned(cell.victim, cell.phase, FAULT_STEP, self.report, signal=cell.signal, hold_s=hold_s)
        checkpoints = f"checkpointing.checkpoint_dir={self.folder}/checkpoints"
        overrides = (*OVERRIDES, *MODES[mode], checkpoints)
        return self.runs.start("run_grpo.py", "grpo_math_cpu.yaml", *overrides, logs=logs, environment=environment)

    @property
    def report(self) -> Path:
        """The file that says which process got the signal, and when."""
        return self.folder / "fault.json"

    def finish_without_fault(self, mode: str) -> Metrics:
        """Run to the end in a mode and return the metrics."""
        run = self.start(None, mode)
        assert run.finish() == 0, run.log()[-3000:]
        return of_training(logged_once(run.log_dir))


def planned(
    victim: str, phase: str, step: int, report: Path, *, signal: str = "SIGKILL", hold_s: float = 0.0
) -> dict[str, str]:
    """Return the environment of a program that sends a signal; arguments as `sitecustomize.Fault` describes them."""
    plan = {
        "victim": victim,
        "phase": phase,
        "step": step,
        "signal": signal,
        "hold_s": hold_s,
        "report": str(report),
    }
    path = os.pathsep.join([str(_INJECTOR), str(REPOSITORY)])
    return {"PYTHONPATH": path, "FAULT_PLAN": json.dumps(plan)}


def logged_once(log_dir: Path) -> Metrics:
    """Return the metrics of one run, and check that its file has each group of a step once."""
    (path,) = log_dir.glob("exp_*/metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    groups = [(row["prefix"], row["step"]) for row in rows]
    assert len(groups) == len(set(groups)), f"{path} has groups of metrics twice"
    return read_metrics(log_dir)
