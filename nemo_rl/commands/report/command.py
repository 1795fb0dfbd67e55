"""Define the command line of `nemo_rl report`.

It imports little, so that the help appears immediately. Invariant: files of a run are only read.
"""

import argparse
from pathlib import Path

NAME = "report"
SUMMARY = "write one HTML file that shows what runs did"
DESCRIPTION = """Write one HTML file that shows runs: how they ended, findings, curves, times, samples, settings.

The file needs no network and no other file. Several runs are compared; those that differ in their seed only can be
drawn as a band. A run that still goes on is shown as far as it is; `nemo_rl watch` follows it."""
DEFAULT_SAMPLES = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="log folder of a run (its newest exp_*)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="HTML file (default: report.html in the first run)")
    parser.add_argument(
        "--samples",
        type=int,
        default=DEFAULT_SAMPLES,
        help=f"samples of each run that are in the file with conversation and tokens (default: {DEFAULT_SAMPLES})",
    )


def main(arguments: argparse.Namespace) -> int:
    """Write the file and return the exit status."""
    from nemo_rl.commands.report.page import write_report
    from nemo_rl.launch import command_line

    def work() -> int:
        write_report(arguments.runs, arguments.output, arguments.samples)
        return 0

    return command_line.exit_status(work)
