"""Define the command line of `nemo_rl report`.

The module imports little, so that the help appears immediately. Invariant: files of a run are only read.
"""

import argparse
from pathlib import Path

NAME = "report"
SUMMARY = "write one HTML file that shows what runs did"
DESCRIPTION = """Write one HTML file that shows runs: how they ended, findings, curves, times, samples, settings.

The file needs no network and no other file. Several runs are compared; those that differ in their seed only are joined
and drawn as a band. A run that went on from a checkpoint in another exp_* is one run. A run that still goes on is shown
as far as it is; `nemo_rl watch` follows it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="log folder of runs (all its exp_*), one exp_*, or a folder of log folders",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="HTML file (default: report.html in FOLDER)")
    parser.add_argument(
        "--samples",
        type=int,
        help="samples of each run that are in the file with conversation and tokens (default: 256, and 1024 of "
        "all runs together)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Write the file and return the exit status."""
    from nemo_rl.commands.report.page import write_report
    from nemo_rl.launch import command_line

    def work() -> int:
        write_report(arguments.runs, arguments.output, arguments.samples)
        return 0

    return command_line.exit_status(work)
