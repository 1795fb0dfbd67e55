"""Train a model that reads images with GRPO.

    uv run examples/run_vlm_grpo.py [--config FILE] [--dry-run] [key=value ...]

Without --config the run is described by examples/configs/vlm_grpo_3B.yaml (GPUs); on a machine without a GPU use
--config examples/configs/vlm_grpo_cpu.yaml. The program is that of run_grpo.py with images on:
policy.tokenizer.use_processor=true.
Overrides follow Hydra's grammar.
"""

import sys
import time

from nemo_rl.launch.programs import run_program

STARTED_AT = time.perf_counter()


def main() -> int:
    """Run from the command line and return the exit status."""
    return run_program(
        "grpo",
        __doc__ or "",
        base_file="vlm_grpo_3B.yaml",
        overrides=("policy.tokenizer.use_processor=true",),
        started_at=STARTED_AT,
    )


if __name__ == "__main__":
    sys.exit(main())
