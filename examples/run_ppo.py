"""Train with PPO: a policy, and a critic that predicts its rewards.

    uv run examples/run_ppo.py [--config FILE] [--dry-run] [key=value ...]

Without --config the run is described by examples/configs/ppo_math_1B.yaml (one GPU); on a machine without a GPU use
--config examples/configs/ppo_math_cpu.yaml. Overrides follow Hydra's grammar.
"""

import sys
import time

from nemo_rl.launch.programs import run_program

STARTED_AT = time.perf_counter()


def main() -> int:
    """Run from the command line and return the exit status."""
    return run_program("ppo", __doc__ or "", started_at=STARTED_AT)


if __name__ == "__main__":
    sys.exit(main())
