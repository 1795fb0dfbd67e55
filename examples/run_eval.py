"""Evaluate a model on problems with known answers.

    uv run examples/run_eval.py [--config FILE] [--dry-run] [key=value ...]

Without --config the evaluation is described by examples/configs/evals/eval.yaml (one GPU); on a machine
without a GPU use --config examples/configs/evals/eval_cpu.yaml. An override sets a key, and everything after
its first `=` is the value, as in OmegaConf's dotlists; Hydra's grammar (`+key=value`, `~key`) works too.
"""

import sys

from nemo_rl.launch.programs import run_program


def main() -> int:
    """Run from the command line and return the exit status."""
    return run_program("eval", __doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
