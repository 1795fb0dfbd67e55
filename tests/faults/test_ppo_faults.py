"""Kill PPO between two passes of a step, and inside an update: the step is repeated, and every number is the same."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_runs import ExampleRuns, Metrics, of_training
from fault_runs import logged_once, planned
from ppo_runs import CONFIG, SCRIPT, SMALL_HF

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(600)]

STEPS, FAULT_STEP = 4, 3
"""The newest checkpoint then is of step 2, so step 3 is made again."""
UPDATES_OF_A_PASS, PASSES = 2, 2
BEFORE = (FAULT_STEP - 1) * PASSES * UPDATES_OF_A_PASS
"""Updates of each model before the step of the fault."""
OVERRIDES = (*SMALL_HF, f"ppo.max_num_steps={STEPS}", "ppo.val_period=0", "checkpointing.save_period=2")
NEXT_PASS = BEFORE + UPDATES_OF_A_PASS + 1


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[ExampleRuns]:
    made = ExampleRuns(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metrics]:
    folder = tmp_path_factory.mktemp("undisturbed")
    made = ExampleRuns(folder)
    run = made.start(SCRIPT, CONFIG, *OVERRIDES, f"checkpointing.checkpoint_dir={folder}/checkpoints")
    try:
        assert run.finish() == 0, run.log()[-3000:]
        metrics = of_training(logged_once(run.log_dir))
        assert all(metrics["train", FAULT_STEP, name] == PASSES * UPDATES_OF_A_PASS for name in NUMBERS)
        yield metrics
    finally:
        made.close()


NUMBERS = ("num_updates", "critic/num_updates")


@pytest.mark.parametrize(
    ("phase", "update"),
    [
        pytest.param("before update of value", NEXT_PASS, id="between the passes of the critic"),
        pytest.param("update of value", NEXT_PASS + 1, id="inside an update of the critic"),
        pytest.param("before update of lm_policy", NEXT_PASS, id="between the passes of the policy"),
    ],
)
def test_a_killed_driver_resumes_bit_for_bit(
    phase: str, update: int, runs: ExampleRuns, tmp_path: Path, undisturbed: Metrics
) -> None:
    report, overrides = tmp_path / "fault.json", (*OVERRIDES, f"checkpointing.checkpoint_dir={tmp_path}/checkpoints")
    killed = runs.start(SCRIPT, CONFIG, *overrides, environment=planned("driver", phase, update, report))
    while killed.process.poll() is None:
        killed.processes()
        time.sleep(0.2)
    assert killed.finish() == -9, killed.log()[-3000:]
    assert json.loads(report.read_text())["pid"] == killed.process.pid
    assert killed.survivors() == []
    before = of_training(logged_once(killed.log_dir))
    assert {step for _, step, _ in before} == {1, 2}, "the step of the fault was not complete"
    resumed = runs.start(SCRIPT, CONFIG, *overrides, logs="resumed")
    assert resumed.finish() == 0, resumed.log()[-3000:]
    after = of_training(logged_once(resumed.log_dir))
    assert {step for _, step, _ in after} == {3, 4}
    assert before | after == undisturbed


def test_a_killed_rank_of_the_critic_is_replaced(runs: ExampleRuns, tmp_path: Path, undisturbed: Metrics) -> None:
    """The policy has not been trained in this step, but its ranks are replaced too, and both models are as saved."""
    report = tmp_path / "fault.json"
    environment = planned("critic rank at work", "update of value", NEXT_PASS + 1, report)
    checkpoints = f"checkpointing.checkpoint_dir={tmp_path}/checkpoints"
    run = runs.start(SCRIPT, CONFIG, *OVERRIDES, checkpoints, environment=environment)
    assert run.finish() == 0, run.log()[-3000:]
    assert report.exists()
    assert "Restart 1 of 3: the ranks of value are replaced" in run.log()
    assert of_training(logged_once(run.log_dir)) == undisturbed
