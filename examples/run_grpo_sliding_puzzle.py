"""Train a model with GRPO to solve sliding puzzles.

    uv run examples/run_grpo_sliding_puzzle.py [--config FILE] [--dry-run] [key=value ...]

Without --config the run is described by examples/configs/grpo_sliding_puzzle.yaml (one GPU); on a machine without a GPU
use --config examples/configs/grpo_sliding_puzzle_cpu.yaml. A configuration whose data names another environment, as
NeMo RL's does, gets generated boards instead of that data.
"""

import sys
import time
from pathlib import Path

from nemo_rl.config import DatasetConfig, GRPOMasterConfig
from nemo_rl.launch.command_line import launch
from nemo_rl.launch.programs import PROGRAMS

STARTED_AT = time.perf_counter()
DEFAULT_CONFIG = Path(__file__).parent / "configs" / "grpo_sliding_puzzle.yaml"
ENVIRONMENT = "sliding_puzzle_game"


def train_on_boards(config: GRPOMasterConfig) -> None:
    """Train on the data of the configuration if it is about the puzzle, else on generated boards."""
    if ENVIRONMENT not in {entry.env_name for entry in config.data.train_entries}:
        boards = {"dataset_name": "episodes", "processor": "episode_data_processor", "env_name": ENVIRONMENT}
        config.data.train = DatasetConfig.build(**boards, seed=config.grpo.seed)
        config.data.validation = DatasetConfig.build(**boards)
    PROGRAMS["grpo"].train(config, started_at=STARTED_AT)


def main() -> int:
    """Run from the command line and return the exit status."""
    return launch(__doc__ or "", DEFAULT_CONFIG, GRPOMasterConfig, train_on_boards)


if __name__ == "__main__":
    sys.exit(main())
