"""What the functional tests of SFT, DPO and reward models share."""

from pathlib import Path

from example_runs import Metrics, StartExample, killed_and_resumed


def run_and_resume(start: StartExample, name: str, steps: int, folder: Path) -> Metrics:
    """Metrics of a run of `steps` steps that was killed and resumed on the way; see `killed_and_resumed`."""
    period = steps // 2
    overrides = (
        f"{name}.max_num_steps={steps}",
        f"{name}.val_period={period}",
        f"checkpointing.save_period={period + 1}",
    )
    return killed_and_resumed(start, f"run_{name}.py", f"{name}_cpu.yaml", overrides, folder, steps)
