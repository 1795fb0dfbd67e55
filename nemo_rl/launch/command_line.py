"""The command line and the exit status of all example scripts: `[--config FILE] [--dry-run] [key=value ...]`.

Nothing large is imported before the configuration is accepted, so a wrong key is reported within a second. Invariant: a
mistake of the user gives one message and exit status 2; a failure of the run one message and 1; after a signal the
status is 75 (EX_TEMPFAIL) if the same command resumes from what was saved, else 128 + the signal's number.
"""

import argparse
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType

import nemo_rl
from nemo_rl.config import RunConfig, load_config
from nemo_rl.environments.user_errors import report
from nemo_rl.host.stop_signals import in_notebook, leave_at_once
from nemo_rl.launch.checks import Moment, hide_warnings, make_checks
from nemo_rl.optimizations.fork_server import start_fork_server
from nemo_rl.optimizations.switch import is_on
from nemo_rl.utils.errors import ConfigError, NemoRLError
from nemo_rl.utils.logging_setup import configure_logging

logger = logging.getLogger(__name__)

TROUBLESHOOTING = "docs/start/troubleshooting.md"
"""Page that is named below the error that ends a run. Messages about a user's mistake already contain advice."""


def launch[ConfigT: RunConfig](
    description: str,
    default_config: Path,
    schema: type[ConfigT],
    run: Callable[[ConfigT], None],
    arguments: list[str] | None = None,
) -> int:
    """Read the configuration and run.

    Args:
        description: help text.
        default_config: YAML file when `--config` is absent.
        schema: class of the configuration.
        run: function that does the work, called with the checked configuration.
        arguments: command line without the program, or None for `sys.argv`.

    Returns:
        Exit status.
    """
    leave_at_once()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=default_config, help="YAML file of the run")
    parser.add_argument(
        "--dry-run", action="store_true", help="show what the run would be and whether it fits its GPUs; start nothing"
    )
    known, overrides = parser.parse_known_args(arguments)

    def work() -> int:
        look_in_the_current_folder()
        logger.info("nemo_rl %s: reading the configuration %s", nemo_rl.__version__, known.config)
        config = load_config(known.config, overrides, schema=schema)
        if known.dry_run:
            # The core does not import commands, and a refused configuration does not wait for torch.
            status: int = importlib.import_module("nemo_rl.commands.dry_run").dry_run(config)
            return status
        prepare(config)
        run(config)
        return 0

    return exit_status(work)


def prepare(config: RunConfig, without: Collection[str] = ()) -> None:
    """Make the checks before `setup`, and fork the server of workers if that is safe.

    Args:
        config: a checked configuration.
        without: as in `make_checks`.
    """
    hide_warnings()
    make_checks(config, Moment.FIRST)
    logger.info("Loading the libraries and the data; the model is %s.", config.policy.model_name)
    is_program = threading.current_thread() is threading.main_thread() and not in_notebook()
    if is_program and not config.cluster.uses_gpu and is_on("fork_server", config.cluster.optimizations):
        start_fork_server(partial(_engine_libraries, config))
    make_checks(config, Moment.LIBRARIES, without)


def show_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an error that ends the program: the user's own lines if it has passed any, else the whole traceback."""
    text = None if issubclass(kind, KeyboardInterrupt | SystemExit) else report(error)
    if text is None:
        sys.__excepthook__(kind, error, trace)
    else:
        with suppress(OSError):
            sys.stderr.write(f"\n{text}\n")


def look_in_the_current_folder() -> None:
    """Let Python import from the folder in which a program was started, where a user's own classes may be.

    Raises:
        ConfigError: the folder no longer exists.
    """
    try:
        folder = os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the current folder does not exist any more. Change to one that does (cd).") from error
    if folder not in sys.path:
        sys.path.append(folder)


def _engine_libraries(config: RunConfig) -> Sequence[str]:
    generation = config.policy.generation
    if generation is None or generation.backend != "vllm":
        return ()
    from nemo_rl.models.generation.vllm.settings import LIBRARIES

    return LIBRARIES


def exit_status(work: Callable[[], int]) -> int:
    """Run the work of a program with its log on the console.

    Returns:
        What `work` returns, or the status of the error that ended it, after its message and notes.
    """
    sys.excepthook = show_uncaught
    try:
        configure_logging()
        return work()
    except NemoRLError as error:
        # The terminal may be closed; that may even be what ended the run.
        with suppress(OSError):
            notes = [*getattr(error, "__notes__", [])]
            if error.exit_status == NemoRLError.exit_status:
                notes.append(f"Causes of such errors, and what to do: {TROUBLESHOOTING}")
            sys.stderr.write("\n".join([f"\n{type(error).__name__}: {error}", *notes, ""]))
        return error.exit_status
