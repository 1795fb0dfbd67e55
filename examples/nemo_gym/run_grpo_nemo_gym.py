"""Train with GRPO on agents of NeMo Gym, or let them play the validation rows once and write the results.

    uv run examples/nemo_gym/run_grpo_nemo_gym.py [--config FILE] [--dry-run] [key=value ...]

Without --config the run is described by examples/nemo_gym/grpo_calculator_cpu.yaml, which needs no GPU.
env.nemo_gym.is_trajectory_collection=true plays all validation rows: results are in results.jsonl of
env.nemo_gym.log_dir, conversations and errors in val_data_step0.jsonl of the run's logs.
"""

import sys
import time
from pathlib import Path

from nemo_rl.config import GRPOMasterConfig
from nemo_rl.config.schema.agents import NEMO_GYM, RESULTS_FILE, NemoGymConfig
from nemo_rl.launch.command_line import launch
from nemo_rl.utils.errors import ConfigError

STARTED_AT = time.perf_counter()
DEFAULT_CONFIG = Path(__file__).parent / "grpo_calculator_cpu.yaml"


def train(config: GRPOMasterConfig) -> None:
    """Set up the run, train or collect, and always stop all workers."""
    # Imported here so that a refused configuration does not wait for torch.
    from nemo_rl.algorithms.grpo import grpo_train, setup

    section = NemoGymConfig.of(config.env.get(NEMO_GYM) or {})
    if section.is_trajectory_collection:
        prepare_collection(config, section)
    with setup(config, started_at=STARTED_AT) as run:
        if section.is_trajectory_collection:
            run.session.validate_alone()
        else:
            grpo_train(run)


def prepare_collection(config: GRPOMasterConfig, section: NemoGymConfig) -> None:
    """Have the validation take all rows.

    Raises:
        ConfigError: there are none, or the file of the results has those of an earlier run.
    """
    data = config.data
    if not data.validation_entries and not any(entry.split_validation_size for entry in data.train_entries):
        raise ConfigError(
            "env.nemo_gym.is_trajectory_collection=true plays the validation rows, and there are none. Set "
            "data.validation to the rows to play."
        )
    results = Path(section.log_dir, RESULTS_FILE)
    if results.exists():
        raise ConfigError(
            f"{results} has the results of an earlier run, and those of this one would be added. Remove it, or choose "
            "another env.nemo_gym.log_dir."
        )
    config.grpo.max_val_samples = None


def main() -> int:
    """Run from the command line and return the exit status."""
    return launch(__doc__ or "", DEFAULT_CONFIG, GRPOMasterConfig, train)


if __name__ == "__main__":
    sys.exit(main())
