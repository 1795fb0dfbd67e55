"""Print what random and optimal players reach in the example games, computed exactly.

    uv run --extra cpu python examples/games_references.py

A trained model is compared with these numbers: the puzzle by `solved` and `moves_over_optimum`, Blackjack by the mean
reward, `accuracy` of a validation.
"""

import sys
from pathlib import Path
from statistics import fmean

from nemo_rl.config import GRPOMasterConfig, load_config
from nemo_rl.data.datasets.response_datasets import EpisodesDataset
from nemo_rl.kits.games.blackjack import expected_reward, optimal_policy, random_policy
from nemo_rl.kits.games.sliding_puzzle import SlidingPuzzleGame, random_solve_rate

CONFIGS = Path(__file__).parent / "configs"


def main() -> int:
    """Print a line for each game and split."""
    config = load_config(CONFIGS / "grpo_sliding_puzzle_cpu.yaml", schema=GRPOMasterConfig)
    puzzle = config.env["sliding_puzzle_game"].cfg
    game = SlidingPuzzleGame(puzzle.game_config, puzzle.max_moves)
    [entry] = config.data.validation_entries
    rows = [row["extra_env_info"] for row in EpisodesDataset(entry, "validation").dataset]
    states = [game.start(row["seed"], row["split"], 0).state for row in rows]
    rate = fmean(random_solve_rate(state["grid"], puzzle.max_moves) for state in states)
    moves = fmean(state["optimal_moves"] for state in states)
    boards = len({str(state["grid"]) for state in states})
    print(f"sliding puzzle, validation: {len(states)} episodes with {boards} boards")
    print(f"  random legal moves solve {rate:.3f}; optimal play solves 1.000 in {moves:.2f} moves on average")
    for split in ("train", "validation"):
        random_reward, best = (expected_reward(policy, split) for policy in (random_policy, optimal_policy))
        print(f"Blackjack, {split}: expected reward {random_reward:.4f} of random play, {best:.4f} of optimal play")
    return 0


if __name__ == "__main__":
    sys.exit(main())
