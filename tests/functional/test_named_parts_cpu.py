"""A run whose environment, advantage estimator, loss and rollout source are a user's classes, named in its file."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from example_runs import REPOSITORY, run_environment

PAGE = REPOSITORY / "docs/development/adding-things.md"
DISCOUNT = 0.5

GAME = '''
import torch

from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn


class LongAnswers(EnvironmentInterface):
    """Rewards each of two turns by the length of its answer."""

    def __init__(self, cfg):
        self.most = cfg["characters"]

    def open_episode(self, metadata):
        from nemo_rl.environments.interfaces import EpisodeStart

        return EpisodeStart({**metadata, "turns": 0})

    def step(self, message_log_batch, metadata):
        states = [{**state, "turns": state["turns"] + 1} for state in metadata]
        lengths = torch.tensor([float(len(log[-1]["content"])) for log in message_log_batch])
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "And again?"}] * len(states),
            metadata=states,
            next_stop_strings=[None] * len(states),
            rewards=(lengths / self.most).clamp(max=1.0) + torch.tensor([float(state["turns"]) for state in states]),
            terminateds=torch.tensor([state["turns"] == 2 for state in states]),
        )
'''


SOURCE = '''
class Counted:
    """Counts the groups of a step."""

    def __init__(self, inner, metric: str = "num_groups"):
        self.inner, self.metric, self.metrics = inner, metric, {}

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def next_groups(self, step):
        num_groups = 0
        for group in self.inner.next_groups(step):
            num_groups += 1
            yield group
        self.metrics = {**self.inner.metrics, self.metric: float(num_groups)}
'''


def write_parts(folder: Path) -> None:
    """The classes that the documentation shows, as files of the user's project."""
    folder.mkdir()
    shown = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.M)
    for file, class_name in (
        ("my_advantages", "DiscountedTurns"),
        ("my_loss", "RewardWeightedLoss"),
    ):
        (block,) = [text for text in shown if f"class {class_name}" in text]
        (folder / f"{file}.py").write_text(f"import torch\n\n{block}", encoding="utf-8")
    (folder / "my_game.py").write_text(GAME, encoding="utf-8")
    (folder / "my_source.py").write_text(SOURCE, encoding="utf-8")


def config(**changes: object) -> dict:
    return {
        "defaults": str(REPOSITORY / "examples/configs/grpo_math_cpu.yaml"),
        "grpo": {
            "max_num_steps": 2,
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 4,
            "max_rollout_turns": 2,
            "val_at_start": False,
            "val_period": 0,
            "adv_estimator": {"name": "my_project.my_advantages.DiscountedTurns", "kwargs": {"discount": DISCOUNT}},
            "rollout_source": {"name": "my_project.my_source.Counted", "kwargs": {"metric": "groups_seen"}},
        },
        "loss_fn": {"name": "my_project.my_loss.RewardWeightedLoss", "kwargs": {"threshold": 0.25}},
        "policy": {"train_global_batch_size": 8, "generation": {"backend": "hf", "max_new_tokens": 24}},
        "data": {"default": {"env_name": "my_project.my_game.LongAnswers"}},
        "env": {"my_project.my_game.LongAnswers": {"characters": 40}},
        "checkpointing": {"enabled": False},
        **changes,
    }


def run(folder: Path, tree: dict, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "own.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    command = [sys.executable, str(REPOSITORY / "examples/run_grpo.py"), "--config", "own.yaml", *arguments]
    return subprocess.run(command, cwd=folder, env=run_environment(), capture_output=True, text=True, timeout=230)


def expected_advantages(row: dict) -> list[float]:
    """The discounted sum of the rewards of a turn and of all later ones, on the turn's tokens."""
    returns, later = [], 0.0
    for reward in reversed(row["turn_rewards"]):
        later = reward + DISCOUNT * later
        returns.insert(0, later)
    advantages, turn, was_written = [], -1, 0
    for is_written in row["token_loss_mask"]:
        turn += is_written and not was_written
        was_written = is_written
        advantages.append(returns[turn] if is_written else 0.0)
    return advantages


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(240)
@pytest.mark.long
def test_each_token_gets_the_discounted_return_of_its_turn(tmp_path: Path) -> None:
    write_parts(tmp_path / "my_project")
    done = run(tmp_path, config(), "logger.save_trajectories=true")
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = tmp_path.glob("logs/exp_*")
    rows = [json.loads(line) for file in log.glob("train_data_step*.jsonl") for line in file.read_text().splitlines()]
    assert len(rows) == 2 * 8
    assert {len(row["turn_rewards"]) for row in rows} >= {2}
    for row in rows:
        assert sum(row["turn_rewards"]) == pytest.approx(row["rewards"])
        assert row["advantages"] == pytest.approx(expected_advantages(row), abs=1e-5)
    logged = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    trained = [row["metrics"] for row in logged if row["prefix"] == "train"]
    assert all(metrics["groups_seen"] == 2.0 for metrics in trained), "the source has its own metric"
    assert all(metrics["loss"] > 0 and "probs_ratio" not in metrics for metrics in trained), "the loss is the user's"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_wrong_class_is_refused_before_ray_starts(tmp_path: Path) -> None:
    write_parts(tmp_path / "my_project")
    done = run(tmp_path, config(), "loss_fn.name=my_project.my_source.Counted")
    assert done.returncode == 2
    assert "is not a loss: it lacks the methods __call__ of nemo_rl.losses.loss_function.LossFunction" in done.stderr
    assert "Ray started" not in done.stderr
    assert not list(tmp_path.glob("logs/exp_*/metrics.jsonl"))
