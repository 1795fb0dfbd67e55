"""Train with GRPO on agents of NeMo Gym, or let them play the validation rows once and write the results.

    uv run examples/nemo_gym/run_grpo_nemo_gym.py [--config FILE] [--dry-run] [key=value ...]

Without --config the run is described by examples/nemo_gym/grpo_calculator_cpu.yaml, which needs no GPU.
env.nemo_gym.is_trajectory_collection=true plays the validation rows: results are in results.jsonl of
env.nemo_gym.log_dir, conversations and errors in val_data_step0.jsonl of the run's logs.
"""

import sys
import time
from pathlib import Path

from nemo_rl.config import GRPOMasterConfig
from nemo_rl.launch.command_line import launch

STARTED_AT = time.perf_counter()
DEFAULT_CONFIG = Path(__file__).parent / "grpo_calculator_cpu.yaml"


def train(config: GRPOMasterConfig) -> None:
    """Set up the run, train or collect, and always stop all workers."""
    # Imported here so that a refused configuration does not wait for torch.
    from nemo_rl.algorithms.grpo import grpo_train, setup

    with setup(config, started_at=STARTED_AT) as run:
        if config.env["nemo_gym"].is_trajectory_collection:
            run.session.validate_alone()
        else:
            grpo_train(run)


def main() -> int:
    """Run from the command line and return the exit status."""
    return launch(__doc__ or "", DEFAULT_CONFIG, GRPOMasterConfig, train)


if __name__ == "__main__":
    sys.exit(main())
