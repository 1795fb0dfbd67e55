"""Define the command line of `nemo_rl watch`.

The module imports little, so that the help appears immediately. Invariant: files of the run are only read.
"""

import argparse
import os
from pathlib import Path

NAME = "watch"
SUMMARY = "show a run in a browser while it goes on"
DESCRIPTION = """Show a run in a browser while it goes on, and after it.

The page is that of `nemo_rl report` with all samples. It is served on this machine only, at an address with a key that
is printed at the start. From another machine, forward the port: ssh -L 8700:127.0.0.1:8700 MACHINE"""
DEFAULT_PORT = 8700
_NICENESS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="log folder of a run (its newest exp_*)")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"or the next free one; 0: any (default: {DEFAULT_PORT})"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")


def main(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C and return the exit status."""
    os.nice(_NICENESS)  # before the imports: a run on this machine has priority
    from nemo_rl.commands.report.run_files import find_run
    from nemo_rl.commands.report.server import serve
    from nemo_rl.launch import command_line

    def work() -> int:
        serve(find_run(arguments.folder), arguments.host, arguments.port)
        return 0

    return command_line.exit_status(work)
