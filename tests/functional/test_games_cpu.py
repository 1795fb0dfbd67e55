"""The sliding puzzle end to end on the CPU: episodes of many turns that a kill interrupts are repeated exactly."""

from pathlib import Path

import pytest
from example_runs import StartExample, killed_and_resumed

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]


def test_a_killed_run_repeats_its_episodes(start_example: StartExample, tmp_path: Path) -> None:
    """Resumed from step 2 of 5; the steps that both runs made have equal metrics, those of the environment too."""
    overrides = (
        "grpo.max_num_steps=5",
        "checkpointing.save_period=2",
        "grpo.val_period=100",
        "grpo.num_prompts_per_step=4",
        "policy.train_global_batch_size=32",
        "grpo.max_val_samples=16",
    )
    metrics = killed_and_resumed(
        start_example, "run_grpo_sliding_puzzle.py", "grpo_sliding_puzzle_cpu.yaml", overrides, tmp_path, steps=5
    )
    for step in range(1, 6):
        ends = [metrics["train", step, f"sliding_puzzle_game/{end}"] for end in ("solved", "failed", "truncated")]
        assert sum(ends) == pytest.approx(1.0)
        assert metrics["train", step, "sliding_puzzle_game/num_moves"] > 1
