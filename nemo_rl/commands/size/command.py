"""Define the command line of `nemo_rl size`.

The module imports little, so that the help appears immediately. Invariant: the exit status is 0 only for a proposal
that fits; it is 1 if nothing fits, and 2 if the command line or the configuration is wrong.
"""

import argparse
from pathlib import Path

from nemo_rl.host.stop_signals import handlers_kept, leave_at_once

NAME = "size"
SUMMARY = "propose parallel sizes and memory shares for given machines"
DESCRIPTION = """Propose parallel sizes, microbatches, recomputation and engines for the machines of a configuration.

Everything is predicted: no GPU is needed, and nothing is started. cluster.num_nodes and cluster.gpus_per_node are the
machines.
Exit status: 0 with a proposal, 1 if nothing fits, 2 if the command line or the configuration is wrong."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes of the configuration, as for a run")
    parser.add_argument("--gpu", metavar="NAME", help="kind of GPU, such as h100, h200, b200, a100, l40s")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="memory of a GPU, such as 80GiB")
    parser.add_argument(
        "--engines",
        choices=("as-given", "colocated", "separate"),
        default="as-given",
        help="GPUs of the engines: as the configuration says (default), those of the policy, or their own",
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the proposal as a YAML file")
    parser.add_argument("--algorithm", help="the file's algorithm, if its sections do not show it")


def main(arguments: argparse.Namespace) -> int:
    """Size the run, print the proposal, and return the exit status."""
    with handlers_kept():
        leave_at_once()
        from nemo_rl.launch import command_line

        def work() -> int:
            command_line.look_in_the_current_folder()
            from nemo_rl.commands.size.run import size_run

            return size_run(arguments)

        return command_line.exit_status(work)
