"""What the functional tests of SFT, DPO and reward models share: a whole run, and one that was killed."""

from pathlib import Path

from example_runs import Metrics, StartExample, of_training, read_metrics


def run_and_resume(start: StartExample, name: str, steps: int, folder: Path) -> Metrics:
    """Metrics of a run of `steps` steps; a run killed on the way and started again must repeat them exactly."""
    script, config = f"run_{name}.py", f"{name}_cpu.yaml"
    short = (f"{name}.max_num_steps={steps}", f"{name}.val_period={steps // 2}", "checkpointing.save_period=4")
    whole = start(script, config, *short, f"checkpointing.checkpoint_dir={folder}/a", logs="whole")
    assert whole.finish() == 0, whole.log()[-3000:]
    expected = of_training(read_metrics(whole.log_dir))

    checkpoints = f"checkpointing.checkpoint_dir={folder}/b"
    killed = start(script, config, *short, checkpoints, logs="killed")
    killed.wait_for(f"step 6/{steps}")
    killed.processes()
    killed.process.kill()
    killed.finish()
    resumed = start(script, config, *short, checkpoints, logs="killed")
    assert resumed.finish() == 0, resumed.log()[-3000:]
    assert "Resuming from" in resumed.log()
    assert of_training(read_metrics(resumed.log_dir)) == expected
    return expected
