"""Train with GRPO.

    uv run examples/run_grpo.py [--config FILE] [key=value ...]

Without --config the run is described by examples/configs/grpo_math_1B.yaml (one GPU); on a machine without
a GPU use --config examples/configs/grpo_math_cpu.yaml. Overrides follow Hydra's grammar.
"""

import sys
import time
from pathlib import Path

from nemo_rl.algorithms.runtime.launch import launch
from nemo_rl.config import GRPOMasterConfig

STARTED_AT = time.perf_counter()
DEFAULT_CONFIG = Path(__file__).parent / "configs" / "grpo_math_1B.yaml"


def run(config: GRPOMasterConfig) -> None:
    """Assemble the run, train, and stop all workers whatever happens."""
    # Imported here so that a refused configuration does not wait for torch.
    from nemo_rl.algorithms.assemble import assemble_grpo
    from nemo_rl.algorithms.grpo import grpo_train

    parts = assemble_grpo(config, STARTED_AT)
    try:
        grpo_train(parts)
    finally:
        parts.close()


def main() -> int:
    """Run from the command line; returns the exit status."""
    return launch(__doc__ or "", DEFAULT_CONFIG, GRPOMasterConfig, run)


if __name__ == "__main__":
    sys.exit(main())
