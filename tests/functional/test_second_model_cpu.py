"""A run that trains a second model next to the policy, as `adding-things.md` shows it: two files, one command."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from example_runs import REPOSITORY, StartExample, of_training, read_metrics, run_environment
from safetensors.torch import load_file

PATHS = {"PYTHONPATH": str(REPOSITORY)}
ADDING = REPOSITORY / "docs/development/adding-things.md"
SHORT = (
    *("grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=8"),
    *(
        "checkpointing.checkpoint_dir=saved",
        "grpo.val_at_start=false",
        "grpo.val_period=0",
        "policy.generation.backend=hf",
    ),
    *("checkpointing.save_period=2", "policy.generation.max_new_tokens=8", "logger.tensorboard_enabled=false"),
)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The two files of the page, which names the parent of the configuration from the root of the repository."""
    for name in ("with_critic.py", "with_critic.yaml"):
        (block,) = re.findall(rf"```\w+\n(# {re.escape(name)}\n.*?)```", ADDING.read_text(), re.DOTALL)
        (tmp_path / name).write_text(block.replace("defaults: ", f"defaults: {REPOSITORY}/"))
    return tmp_path / "with_critic.py"


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two folders of weights hold the same tensors, bit for bit."""
    files = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    assert files == sorted(path.relative_to(other) for path in other.rglob("*.safetensors")) != []
    pairs = [(load_file(one / file), load_file(other / file)) for file in files]
    return all(a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_killed_run_with_a_critic_resumes_both_models_bit_for_bit(
    start_example: StartExample, program: Path, tmp_path: Path
) -> None:
    """The run is killed in its fifth step, and continues from its second one without the checkpoint of the fourth."""
    start = partial(start_example, str(program), str(program.with_suffix(".yaml")), *SHORT, environment=PATHS)
    killed = start("grpo.max_num_steps=5", logs="killed")
    killed.wait_for("step 4/")
    killed.processes()
    killed.process.kill()
    killed.finish()
    assert killed.survivors(60) == []
    (tmp_path / "saved/step_4").rename(tmp_path / "before")
    resumed = start("grpo.max_num_steps=4", logs="resumed")
    assert resumed.finish() == 0, resumed.log()[-3000:]

    want, got = (of_training(read_metrics(run.log_dir)) for run in (killed, resumed))
    assert {step for _, step, _ in got} == {3, 4}
    assert got == {key: value for key, value in want.items() if key[1] in (3, 4)}
    assert len({want["train", step, "critic_loss"] for step in (1, 2, 3, 4)}) == 4
    for model in ("policy", "critic"):
        first, after = (tmp_path / "saved" / step / model for step in ("step_2", "step_4"))
        assert same_tensors(tmp_path / "before" / model / "weights", after / "weights")
        assert not same_tensors(first / "weights", after / "weights")
        assert (after / "optimizer").exists()


def test_the_dry_run_shows_the_critic(program: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(program), "--dry-run", *SHORT],
        cwd=program.parent,
        env=run_environment() | PATHS,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"critic +\S+tiny-chat by dtensor_cfg, 1 rank .*, on the policy's devices in turns", done.stdout)
    sizes = dict(re.findall(r"^  (policy|critic) +([\d.]+ \w+)$", done.stdout, re.MULTILINE))
    assert sizes.keys() == {"policy", "critic"}
