"""Define the command line of `nemo_rl regrade`.

The module imports little, so that the help appears immediately. Invariant: files of a run are only read; the exit
status is 0 if every sample was graded, whether or not a reward changed.
"""

import argparse
from pathlib import Path

NAME = "regrade"
SUMMARY = "compute the rewards of stored samples again"
DESCRIPTION = """Compute the rewards of a run's stored samples again, without sampling, and show the differences.

The environments are those of the configuration, which may differ from the run's: change a key of `env`, or name another
environment with --environment. The data must be that of the run, because samples are stored with their row's number.
Rewards go to a new file; files of the run are only read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.add_argument("folder", type=Path, help="log folder of a run (its newest exp_*), or one of its *.jsonl files")
    parser.add_argument("--config", type=Path, metavar="FILE", required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes of the configuration, as for a run")
    parser.add_argument("--environment", metavar="NAME", help="reward all samples by this environment of `env`")
    parser.add_argument("--only", choices=("train", "validation"), help="samples of one phase")
    parser.add_argument("--output", type=Path, metavar="FILE", help="new file (default: regraded.jsonl in the folder)")


def main(arguments: argparse.Namespace) -> int:
    """Compute the rewards, write them, show the differences, and return the exit status."""
    from nemo_rl.commands.regrade.run import regrade
    from nemo_rl.launch import command_line

    def work() -> int:
        command_line.look_in_the_current_folder()
        regrade(arguments)
        return 0

    return command_line.exit_status(work)
