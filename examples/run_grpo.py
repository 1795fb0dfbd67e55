"""Train with GRPO.

    uv run examples/run_grpo.py [--config FILE] [key=value ...]

Without --config the run is described by examples/configs/grpo_math_1B.yaml (one GPU); on a machine without
a GPU use --config examples/configs/grpo_math_cpu.yaml. Overrides follow Hydra's grammar.
"""

import time

STARTED_AT = time.perf_counter()

import argparse  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_rl.utils.logging_setup import configure_logging  # noqa: E402

from nemo_rl.config import GRPOMasterConfig, check_device, count_gpus, load_config  # noqa: E402
from nemo_rl.utils.errors import ConfigError, DataError, NemoRLError  # noqa: E402

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "grpo_math_1B.yaml"


def parse_arguments() -> tuple[Path, list[str]]:
    """The configuration file and the overrides."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="YAML file of the run")
    arguments, overrides = parser.parse_known_args()
    return arguments.config, overrides


def load() -> GRPOMasterConfig:
    """The checked configuration; everything that can be refused without workers is refused here."""
    path, overrides = parse_arguments()
    config = load_config(path, overrides, schema=GRPOMasterConfig)
    check_device(config, count_gpus())
    return config


def run(config: GRPOMasterConfig) -> None:
    """Assemble the run, train, and stop all workers whatever happens."""
    from nemo_rl.algorithms.assemble import assemble_grpo
    from nemo_rl.algorithms.grpo import grpo_train

    grpo_run = assemble_grpo(config, STARTED_AT)
    try:
        grpo_train(grpo_run)
    finally:
        grpo_run.close()


def main() -> int:
    """Run; a mistake of the user is one message, not a traceback."""
    configure_logging()
    try:
        run(load())
    except (ConfigError, DataError) as mistake:
        sys.stderr.write(f"\n{type(mistake).__name__}: {mistake}\n")
        return 2
    except NemoRLError as failure:
        sys.stderr.write(f"\n{type(failure).__name__}: {failure}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
