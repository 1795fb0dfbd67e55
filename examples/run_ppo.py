"""Train with PPO: a policy, and a critic that predicts its rewards.

    uv run examples/run_ppo.py [--config FILE] [--dry-run] [key=value ...]

Without --config the run is described by examples/configs/ppo_math_1B.yaml (one GPU); on a machine without a GPU use
--config examples/configs/ppo_math_cpu.yaml. Overrides follow Hydra's grammar.
"""

import sys
import time
from pathlib import Path

from nemo_rl.config import PPOMasterConfig
from nemo_rl.launch.command_line import launch

STARTED_AT = time.perf_counter()
DEFAULT_CONFIG = Path(__file__).parent / "configs" / "ppo_math_1B.yaml"


def train(config: PPOMasterConfig) -> None:
    """Set up the run, train, and always stop all workers."""
    # Imported here so that a refused configuration does not wait for torch.
    from nemo_rl.algorithms.ppo import ppo_train, setup

    with setup(config, started_at=STARTED_AT) as run:
        ppo_train(run)


def main() -> int:
    """Run from the command line and return the exit status."""
    return launch(__doc__ or "", DEFAULT_CONFIG, PPOMasterConfig, train)


if __name__ == "__main__":
    sys.exit(main())
