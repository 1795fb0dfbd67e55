"""Runs shared by the functional tests of SFT, DPO and reward models."""

from pathlib import Path

from example_runs import Metrics, StartExample, finished, killed_and_resumed


def run_once(start: StartExample, name: str, steps: int, folder: Path) -> Metrics:
    """Return the metrics of a run of `steps` steps."""
    return finished(start, f"run_{name}.py", f"{name}_cpu.yaml", _overrides(name, steps), folder)


def run_and_resume(start: StartExample, name: str, steps: int, folder: Path, *overrides: str) -> Metrics:
    """Return the metrics of a run that was killed and resumed; see `killed_and_resumed`."""
    changes = (*_overrides(name, steps), *overrides)
    return killed_and_resumed(start, f"run_{name}.py", f"{name}_cpu.yaml", changes, folder, steps)


def _overrides(name: str, steps: int) -> tuple[str, ...]:
    period = steps // 2
    return (f"{name}.max_num_steps={steps}", f"{name}.val_period={period}", f"checkpointing.save_period={period + 1}")
