"""Penalties and levels of effort in a short run of GRPO: metrics, stored samples, runners, rewards again."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from example_runs import REPOSITORY, StartExample, finished, of_training, read_metrics, run_environment

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

CONFIG = "grpo_math_cpu.yaml"
SEVEN = 22
"""The token of the digit 7 in the tokenizer of `examples/assets/tiny-chat`."""
REWARDS = (
    "reward_penalties.penalize_unwanted_tokens=true",
    f"reward_penalties.token_ids.unwanted=[{SEVEN}]",
    "reward_penalties.penalize_malformed_think_tag=true",
    'reward_penalties.thinking_tags=["boxed{","}"]',
    "effort_levels={low: {system_prompt: Short., max_thinking_tokens: 1, over_budget_penalty: 0.5}, high: {weight: 2}}",
)
OVERRIDES = (
    *("grpo.max_num_steps=3", "grpo.val_at_start=false", "grpo.val_period=3", "grpo.max_val_samples=16"),
    *("grpo.val_batch_size=16", "checkpointing.enabled=false", "logger.save_trajectories=true", *REWARDS),
)


def stored(log_dir: Path, name: str) -> list[dict[str, Any]]:
    (file,) = log_dir.glob(f"exp_*/{name}")
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.long
def test_penalties_are_in_metrics_and_samples_and_the_same_with_runners_and_afterwards(
    start_example: StartExample, tmp_path: Path
) -> None:
    metrics = finished(start_example, "run_grpo.py", CONFIG, OVERRIDES, tmp_path)
    logs = tmp_path / "logs"
    for step in (1, 2, 3):
        samples = stored(logs, f"train_data_step{step}.jsonl")
        have_seven = [SEVEN in token_ids(sample) for sample in samples]
        assert [sample["penalties"]["unwanted_tokens"] == [0] for sample in samples] == have_seven
        assert metrics["train", step, "penalized_by_unwanted_tokens"] == pytest.approx(fmean(have_seven))
        penalised = [any(sample["penalties"].values()) for sample in samples]
        rewards = [0.0 if is_penalised else s["rewards"] for is_penalised, s in zip(penalised, samples, strict=True)]
        assert [sample["penalized_reward"] for sample in samples] == rewards
        assert metrics["train", step, "penalized_reward"] == pytest.approx(fmean(rewards))
        assert metrics["train", step, "reward"] == pytest.approx(fmean(s["rewards"] for s in samples))
        over = [0.5 * (s["effort"] == "low") * min(max(s["num_thinking_tokens"] - 1, 0), 1) for s in samples]
        assert metrics["train", step, "filtered_reward"] == pytest.approx(fmean(rewards) - fmean(over))
        assert len({(sample["group"], sample["effort"]) for sample in samples}) == 8
        assert all((s["effort"] == "low") == ("Short." in s["content"][0]["content"]) for s in samples)
    assert 0 < metrics["train", 1, "penalized_by_unwanted_tokens"] < 1
    held_out = stored(logs, "val_data_step3.jsonl")
    assert metrics["validation", 3, "accuracy"] == pytest.approx(fmean(sample["rewards"] for sample in held_out))
    assert {sample["effort"] for sample in held_out} == {"low", "high"}

    remote = start_example("run_grpo.py", CONFIG, *OVERRIDES, "cluster.rollout_runners=1", logs="runner")
    assert remote.finish() == 0, remote.log()[-3000:]
    found = of_training(read_metrics(remote.log_dir))
    assert found == pytest.approx(metrics, abs=1e-6)

    regraded = regrade(logs, tmp_path / "regraded.jsonl")
    rows = [row for step in (1, 2, 3) for row in stored(logs, f"train_data_step{step}.jsonl")]
    again = [line for line in regraded if line["file"].startswith("train")]
    for name in ("penalized_reward", "penalties"):
        assert [line[name] for line in again] == [row[name] for row in rows]


def token_ids(sample: dict[str, Any]) -> list[int]:
    """Return the sampled tokens of a stored sample."""
    return [token for token, mask in zip(sample["token_ids"], sample["token_loss_mask"], strict=True) if mask]


def regrade(logs: Path, output: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "nemo_rl", "regrade", str(logs), "--output", str(output)]
    command += ["--config", f"examples/configs/{CONFIG}", *REWARDS]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=run_environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of " in done.stdout and "rewards changed" in done.stdout, done.stdout
    return [json.loads(line) for line in output.read_text().splitlines()]
