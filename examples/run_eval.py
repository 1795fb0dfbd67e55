"""Evaluate a model on problems with known answers.

    uv run examples/run_eval.py [--config FILE] [--dry-run] [key=value ...]

Without --config the evaluation is described by examples/configs/evals/eval.yaml (one GPU); on a machine
without a GPU use --config examples/configs/evals/eval_cpu.yaml. An override sets a key, and everything after
its first `=` is the value, as in OmegaConf's dotlists; Hydra's grammar (`+key=value`, `~key`) works too.
"""

import sys
from pathlib import Path

from nemo_rl.config.loading.overrides import dotlist_to_overrides
from nemo_rl.config.runs.eval import EvalMasterConfig
from nemo_rl.launch.command_line import launch

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "evals" / "eval.yaml"


def run(config: EvalMasterConfig) -> None:
    """Evaluate and show the report."""
    # Imported here so that a refused configuration does not wait for torch.
    from nemo_rl.evals.eval import evaluate, format_report

    report = evaluate(config)
    print(f"\n{format_report(report)}")


def main() -> int:
    """Run from the command line and return the exit status."""
    arguments = dotlist_to_overrides(sys.argv[1:])
    return launch(__doc__ or "", DEFAULT_CONFIG, EvalMasterConfig, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
