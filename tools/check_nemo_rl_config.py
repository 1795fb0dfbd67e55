"""Check whether configurations written for NeMo RL load here, and print the reasons key by key if not.

    python tools/check_nemo_rl_config.py examples/configs/grpo_math_1B.yaml
    python tools/check_nemo_rl_config.py recipe.yaml teacher.model_name=Qwen/Qwen3-4B --algorithm distillation

The sections of a file show its algorithm unless `--algorithm` names it. Overrides apply to every file. Models, data and
prompts need not be on this machine. The exit status is 1 if a file does not load.
"""

import argparse
import sys

from nemo_rl.config.loading.algorithms import ALGORITHMS, algorithm_of
from nemo_rl.config.loading.all_errors import collect_errors
from nemo_rl.utils.errors import ConfigError


def main() -> int:
    """Check each file; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE", help="YAML file, or an override key=value")
    parser.add_argument("--algorithm", choices=ALGORITHMS, help="algorithm of the files; default: by their sections")
    arguments = parser.parse_intermixed_args()
    overrides = [text for text in arguments.files if "=" in text]
    num_refused = 0
    for file in arguments.files:
        if file in overrides:
            continue
        try:
            algorithm = arguments.algorithm or algorithm_of(file)
            found = collect_errors(file, algorithm, overrides)
        except ConfigError as error:
            algorithm, found = "?", [str(error)]
        print(f"{file} ({algorithm}): {'does not load' if found else 'loads'}")
        for text in found:
            print(f"  - {text}")
        num_refused += bool(found)
    return int(num_refused > 0)


if __name__ == "__main__":
    sys.exit(main())
