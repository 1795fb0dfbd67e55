"""The example games end to end on the CPU: the tiny player learns to win."""

import pytest
from example_runs import StartExample, read_metrics

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]


def test_the_player_learns_to_solve_puzzles(start_example: StartExample) -> None:
    """Random legal moves solve 0.21 of the 128 boards; a difference of 0.12 is three standard errors of a share."""
    run = start_example(
        "run_grpo_sliding_puzzle.py",
        "grpo_sliding_puzzle_cpu.yaml",
        "grpo.max_num_steps=10",
        "checkpointing.enabled=false",
    )
    assert run.finish(500) == 0, run.log()[-3000:]
    metrics = read_metrics(run.log_dir)
    before, after = (metrics["validation", step, "sliding_puzzle_game/solved"] for step in (0, 10))
    assert before < 0.3
    assert after > before + 0.12
