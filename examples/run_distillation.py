"""Distil a teacher into a student that learns on its own answers.

    uv run examples/run_distillation.py [--config FILE] [--dry-run] [key=value ...]

Without --config the run is described by examples/configs/distillation_math.yaml (GPUs); on a machine without a GPU use
--config examples/configs/distillation_math_cpu.yaml. Overrides follow Hydra's grammar.
"""

import sys
import time

from nemo_rl.launch.programs import run_program

STARTED_AT = time.perf_counter()


def main() -> int:
    """Run from the command line and return the exit status."""
    return run_program("distillation", __doc__ or "", started_at=STARTED_AT)


if __name__ == "__main__":
    sys.exit(main())
