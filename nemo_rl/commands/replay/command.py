"""Define the command line of `nemo_rl replay`.

The module imports little, so that the help appears immediately. Invariant: the files of a run are only read, unless
--add-modules adds to a record. The exit status is 0 if the step is equal, 1 if it differs and 2 if it cannot be
repeated.
"""

import argparse
import logging
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

NAME = "replay"
SUMMARY = "repeat a recorded training step and compare every part with the run"
DESCRIPTION = """Repeat a training step of a run from its checkpoint and recorded rollouts, and compare it with the run.

The run needs logger.record_steps=true, and the checkpoint of the step before, or its initial weights for step 1. It
trains as the run did, without engines, and compares configuration, samples, data, weights, modules, log-probabilities,
advantages, loss, gradients and new weights, in this order. Exit status: 0 equal, 1 different, 2 not repeated."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.add_argument(
        "folder",
        type=Path,
        metavar="RUN",
        help="log folder of a run; of several exp_* in it the newest that recorded the step",
    )
    parser.add_argument("--step", type=int, required=True, metavar="N", help="number of the step")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes of the run's configuration")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="step folder, if it was moved")
    parser.add_argument(
        "--tolerance",
        metavar="FACTOR",
        default="auto",
        help="exact: compare bits; a number: multiply the tolerances by it; auto (default): exact if devices, versions "
        "and layout of the ranks are those of the run, else 1",
    )
    parser.add_argument("--json", action="store_true", help="write the result as JSON to standard output")
    parser.add_argument(
        "--add-modules",
        action="store_true",
        help="if the step is equal bit for bit, add the outputs of modules to its record",
    )


def main(arguments: argparse.Namespace) -> int:
    """Repeat the step, show the result, and return the exit status."""
    from nemo_rl.commands.replay.run import replay
    from nemo_rl.host.boundary import raised_as
    from nemo_rl.launch import command_line
    from nemo_rl.utils.errors import NemoRLError, ReplayError

    def failed(error: Exception) -> ReplayError:
        if not isinstance(error, NemoRLError):
            logger.error("The replay failed.", exc_info=error)
        return ReplayError(f"step {arguments.step} cannot be repeated: {type(error).__name__}: {error}")

    def work() -> int:
        command_line.look_in_the_current_folder()
        with raised_as(failed, but=(ReplayError,)):  # status 1 means a step that differs
            return replay(arguments, sys.stdout)

    return command_line.exit_status(work)
