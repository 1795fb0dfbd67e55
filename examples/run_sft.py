"""Train with supervised fine-tuning (SFT).

    uv run examples/run_sft.py [--config FILE] [--dry-run] [key=value ...]

Without --config the run is described by examples/configs/sft.yaml (one GPU); on a machine without a GPU use
--config examples/configs/sft_cpu.yaml. Overrides follow Hydra's grammar.
"""

import sys
import time
from pathlib import Path

from nemo_rl.config import SFTMasterConfig
from nemo_rl.launch.command_line import launch

STARTED_AT = time.perf_counter()
DEFAULT_CONFIG = Path(__file__).parent / "configs" / "sft.yaml"


def train(config: SFTMasterConfig) -> None:
    """Set up the run, train, and always stop all workers."""
    # Imported here so that a refused configuration does not wait for torch.
    from nemo_rl.algorithms.sft import setup, sft_train

    with setup(config, started_at=STARTED_AT) as run:
        sft_train(run)


def main() -> int:
    """Run from the command line and return the exit status."""
    return launch(__doc__ or "", DEFAULT_CONFIG, SFTMasterConfig, train)


if __name__ == "__main__":
    sys.exit(main())
