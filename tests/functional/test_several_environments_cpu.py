"""Two environments with weights and a curriculum: shares, validation sets, open episodes, and a killed run."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from example_runs import REPOSITORY, StartExample, killed_and_resumed

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

CONFIG = f"""
defaults: {REPOSITORY}/examples/configs/grpo_math_cpu.yaml
grpo:
  num_prompts_per_step: 8
  num_generations_per_prompt: 4
  max_num_steps: 8
  val_period: 4
  val_at_start: false
  max_val_samples: 12
  val_batch_size: 12
policy:
  train_global_batch_size: 32
data:
  train:
    - {{name: sums, dataset_name: arithmetic, num_samples: 100, seed: 1}}
    - {{name: parity, dataset_name: arithmetic, num_samples: 10, seed: 3, env_name: parity_environment.Parity}}
  validation:
    - {{name: sums_test, dataset_name: arithmetic, num_samples: 40, seed: 2}}
    - {{name: parity_test, dataset_name: arithmetic, num_samples: 40, seed: 4, env_name: parity_environment.Parity}}
  curriculum:
    interpolation: linear
    phases:
      - {{from_step: 0, weights: {{sums: 1, parity: 0}}}}
      - {{from_step: 4, weights: {{sums: 1, parity: 1}}}}
    accuracy: {{average_over: 8, min_share: 0.1}}
env:
  parity_environment.Parity: {{max_open_episodes: 3, log: LOG}}
checkpointing:
  save_period: 4
logger:
  tensorboard_enabled: false
"""
STEPS = range(1, 9)


@pytest.mark.parametrize("mode", [pytest.param("none", marks=pytest.mark.long), "ahead"])
def test_two_environments_with_a_curriculum_in_a_killed_run(
    start_example: StartExample, tmp_path: Path, mode: str
) -> None:
    shutil.copy(Path(__file__).with_name("parity_environment.py"), tmp_path)
    config = tmp_path / "two.yaml"
    config.write_text(CONFIG.replace("LOG", str(tmp_path / "open.txt")))
    overrides = (f"grpo.overlap.mode={mode}",)
    metrics = killed_and_resumed(start_example, "run_grpo.py", str(config), overrides, tmp_path, steps=8)

    shares = [(metrics["train", step, "share/sums"], metrics["train", step, "share/parity"]) for step in STEPS]
    assert all(sum(each) == 1 for each in shares)
    assert shares[0] == (1, 0), "the parity set begins after the first step"
    assert all(parity > 0.1 for _, parity in shares[3:])
    for step in STEPS:
        assert metrics["train", step, "target_share/parity"] <= 0.9
        if step > 1:
            assert 0 <= metrics["train", step, "recent_accuracy/sums"] <= 1
    assert {("train", 8, f"{name}/parity") for name in ("recent_accuracy", "accuracy", "reward", "epochs")} <= set(
        metrics
    )

    drawn = Counter[str]()
    for step in STEPS:
        logs = sorted(tmp_path.glob(f"*/exp_*/train_data_step{step}.jsonl"))
        rows = [json.loads(line) for line in logs[-1].read_text().splitlines()]
        found = Counter("sums" if row["idx"] < 100 else "parity" for row in rows if row["sample"] == 0)
        assert (found["sums"] / 8, found["parity"] / 8) == shares[step - 1]
        drawn += found
    if mode == "none":
        assert metrics["train", 8, "epochs/parity"] == pytest.approx(drawn["parity"] / 10)

    for name, environment in (("sums_test", "math"), ("parity_test", "parity_environment.Parity")):
        for step in (4, 8):
            for group in (name, environment):
                assert metrics["validation", step, f"{group}/num_samples"] == 6
            assert (
                metrics["validation", step, f"{name}/accuracy"]
                == metrics["validation", step, f"{environment}/accuracy"]
            )
    open_episodes = {int(line) for line in (tmp_path / "open.txt").read_text().split()}
    assert open_episodes == {1, 2, 3}, "4 samples of each prompt are ready at once, and 3 may be open"
