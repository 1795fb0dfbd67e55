"""`nemo_rl` as a command: `nemo_rl doctor`, `nemo_rl report` ..., or `python -m nemo_rl doctor`.

A subcommand is a module with `NAME`, `SUMMARY`, `DESCRIPTION`, `add_arguments(parser)` and `main(arguments)`, which is
where it imports what is heavy.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` puts the current folder, which may be a stranger's, before the standard library and all packages.
    sys.path.append(sys.path.pop(0))

import argparse  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from typing import Any  # noqa: E402

from nemo_rl.commands import completion, init, serve, smollm2  # noqa: E402
from nemo_rl.commands.doctor import command as doctor  # noqa: E402
from nemo_rl.commands.regrade import command as regrade  # noqa: E402
from nemo_rl.commands.replay import command as replay  # noqa: E402
from nemo_rl.commands.report import command as report  # noqa: E402
from nemo_rl.commands.report import watch_command as watch  # noqa: E402
from nemo_rl.commands.run_programs import RUNS  # noqa: E402
from nemo_rl.commands.size import command as size  # noqa: E402

COMMANDS: list[Any] = [*RUNS, serve, init, smollm2, doctor, regrade, replay, report, size, watch, completion]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status.

    Args:
        arguments: command line without the program, `sys.argv` by default.
    """
    parser = argparse.ArgumentParser(prog="nemo_rl", description="Post-training of language models.")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    parser.set_defaults(parsers=subparsers.choices)
    for command in COMMANDS:
        below = subparsers.add_parser(
            command.NAME,
            help=command.SUMMARY,
            description=command.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(below)
        below.set_defaults(run=command.main)
    # Overrides may stand between and after options, which argparse's own positionals may not.
    known, more = parser.parse_known_args(arguments)
    unknown = [text for text in more if text.startswith("-")]
    if unknown or (more and not hasattr(known, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(unknown or more)}")
    if more:
        known.overrides = [*known.overrides, *more]
    status: int = known.run(known)
    return status


if __name__ == "__main__":
    sys.exit(main())
