"""A GRPO run whose second step is repeated: equal as it was, and each planted change is named."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import planted_backend
import pytest
import torch
from example_runs import REPOSITORY, ExampleRuns, run_environment

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]

OVERRIDES = (
    "grpo.max_num_steps=2",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "policy.train_global_batch_size=16",
    "policy.generation.backend=hf",
    "loss_fn.reference_policy_kl_penalty=0.05",
    "logger.record_steps=true",
    "logger.record_modules=true",
    "checkpointing.save_period=1",
    "policy.dtensor_cfg.enabled=false",
    "policy.training_backend.name=planted_backend.PlantedTraining",
)
FUNCTIONAL = Path(__file__).parent


@dataclass
class RecordedRun:
    """A finished run, and how its steps are repeated."""

    folder: Path

    @property
    def rollouts(self) -> Path:
        return self.folder / "logs/exp_001/steps/step_2.pt"

    def replay(self, *arguments: str, step: int = 2) -> tuple[int, str]:
        """Repeat a step in a process of its own; return exit status and output."""
        command = [sys.executable, "-m", "nemo_rl", "replay", str(self.folder / "logs"), f"--step={step}", *arguments]
        environment = run_environment() | {"PYTHONPATH": f"{REPOSITORY}:{FUNCTIONAL}"}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=240)
        return done.returncode, done.stdout if "--json" in arguments else done.stdout + done.stderr

    def differs(self, *arguments: str) -> dict[str, Any]:
        """Repeat a step that differs; return the result."""
        status, output = self.replay("--json", *arguments)
        assert status == 1, output
        return json.loads(output)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedRun]:
    folder = tmp_path_factory.mktemp("replay")
    runs = ExampleRuns(folder)
    places = (
        f"checkpointing.checkpoint_dir={folder}/checkpoints",
        f"policy.training_backend.kwargs={{folder: {folder}}}",
    )
    path = {"PYTHONPATH": f"{REPOSITORY}:{FUNCTIONAL}"}
    started = runs.start("run_grpo.py", "grpo_math_cpu.yaml", *OVERRIDES, *places, environment=path)
    assert started.finish() == 0, started.log()[-3000:]
    yield RecordedRun(folder)
    runs.close()


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_is_equal_bit_for_bit(run: RecordedRun, step: int) -> None:
    status, output = run.replay(step=step)
    assert status == 0, output
    assert f"Step {step} is equal to that of the run, bit for bit." in output


def test_another_number_of_ranks_is_equal_within_the_tolerances(run: RecordedRun) -> None:
    status, output = run.replay("cluster.ranks_per_node=2")
    assert status == 0, output
    assert "Step 2 is equal to that of the run, within the tolerances." in output
    assert "ranks: 1 in the run, dp_shard=2 now" in output


def test_a_changed_coefficient_of_the_loss_is_named(run: RecordedRun) -> None:
    found = run.differs("loss_fn.reference_policy_kl_penalty=0.1")
    assert found["first"]["name"] == "loss_fn.reference_policy_kl_penalty"
    differing = [stage["name"] for stage in found["stages"] if stage["differing"]]
    assert differing == [
        "configuration",
        "loss and its terms",
        "gradients",
        "learning rate and gradient norm",
        "weights after the step",
    ]


def test_a_changed_kernel_is_named_by_its_module(run: RecordedRun) -> None:
    plant = run.folder / "plant"
    plant.touch()
    try:
        found = run.differs()
    finally:
        plant.unlink()
    assert (found["first"]["stage"], found["first"]["name"]) == ("outputs of modules", planted_backend.MODULE)
    assert f"the forward pass of module {planted_backend.MODULE} differs" in found["verdict"]


def test_a_changed_sample_is_named(run: RecordedRun) -> None:
    whole = run.rollouts.read_bytes()
    stored = torch.load(run.rollouts)
    stored["trajectories"][6]["message_log"][-1]["token_ids"][0] += 1
    torch.save(stored, run.rollouts)
    try:
        found = run.differs()
    finally:
        run.rollouts.write_bytes(whole)
    assert (found["first"]["stage"], found["first"]["name"]) == ("samples", "sample 2 of prompt 1")
    assert "sample 2 of prompt 1 differs from the record: its tokens" in found["verdict"]


def test_other_data_is_named_by_key_and_row(run: RecordedRun) -> None:
    found = run.differs("data.train.seed=7")
    differing = {stage["name"]: stage for stage in found["stages"] if stage["differing"]}
    assert list(differing) == ["configuration", "prompts in the data"]
    assert found["first"]["name"] == "data.train.seed"
    assert (
        "of the training data) differs from the record: token"
        in differing["prompts in the data"]["differences"][0]["text"]
    )


def test_what_cannot_be_repeated_is_refused(run: RecordedRun) -> None:
    status, output = run.replay(step=9)
    assert (status, "step 9 was not recorded" in output) == (2, True), output
    moved = run.folder / "moved"
    (run.folder / "checkpoints/step_1").rename(moved)
    try:
        status, output = run.replay()
        assert (status, "step 2 needs the checkpoint of step 1" in output) == (2, True), output
        status, output = run.replay(f"--checkpoint={moved}")
        assert status == 0, output
    finally:
        moved.rename(run.folder / "checkpoints/step_1")
