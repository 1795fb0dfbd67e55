"""Define the command line of `nemo_rl doctor`.

The module imports little, so that the help appears immediately. Invariant: the exit status is 0 only without a failure,
1 with one, 2 if the command line is wrong, and 128 plus its number after a signal.
"""

import argparse
from pathlib import Path

from nemo_rl.host.stop_signals import handlers_kept, leave_at_once

NAME = "doctor"
SUMMARY = "check this machine or cluster before a run"
DESCRIPTION = """Check this machine, or the cluster at RAY_ADDRESS, before a run.

Without --config only the machine is checked; with it also the configuration's model, data, memory and disk.
With --model, a small model of its architecture is tried with all rows, meshes, backends and engines instead.
No worker is started without --dummy-step. Exit status: 0 without a failure, 1 with one."""
ALGORITHMS = ("grpo", "ppo", "sft", "dpo", "rm", "distillation", "eval", "service")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of the run")
    parser.add_argument(
        "--model",
        metavar="ID_OR_FOLDER",
        help="try a small model of this model's architecture with all rows, meshes, backends and engines",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes of the configuration, as for a run")
    parser.add_argument("--algorithm", choices=ALGORITHMS, help="the file's algorithm, if its sections do not show it")
    parser.add_argument("--json", action="store_true", help="write one JSON object instead of a table")
    parser.add_argument(
        "--dummy-step",
        action="store_true",
        help="start the policy's workers and make one update at the longest length; uses the run's GPUs for minutes",
    )


def main(arguments: argparse.Namespace) -> int:
    """Run all checks, print the findings, and return the exit status."""
    with handlers_kept():
        leave_at_once()
        from nemo_rl.commands.doctor.examination import examine
        from nemo_rl.commands.doctor.report import exit_status, write_json, write_table
        from nemo_rl.launch import command_line

        def work() -> int:
            command_line.look_in_the_current_folder()
            if arguments.model is not None:
                from nemo_rl.commands.doctor.model import examine_model

                return examine_model(arguments)
            findings = examine(arguments)
            (write_json if arguments.json else write_table)(findings)
            return exit_status(findings)

        return command_line.exit_status(work)
