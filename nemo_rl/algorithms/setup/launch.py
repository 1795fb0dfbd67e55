"""The command line that all example scripts share: `[--config FILE] [--dry-run] [key=value ...]`, and their exit
status.

Light until the configuration is accepted: a wrong key is answered in a second, before torch is imported. Invariant: a
mistake of the user is one message and exit status 2; a failure of the run is one message and 1; after a signal the
status is 75 (EX_TEMPFAIL) if the same command goes on from what was saved, else 128 + the signal's number.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from nemo_rl.algorithms.setup.preflight import check_host, check_models
from nemo_rl.config import EvalMasterConfig, MasterConfig, load_config
from nemo_rl.host.stop_signals import leave_at_once
from nemo_rl.optimizations.fork_server import start_fork_server
from nemo_rl.optimizations.switch import is_on
from nemo_rl.utils.errors import ConfigError, NemoRLError
from nemo_rl.utils.logging_setup import configure_logging

TROUBLESHOOTING = "docs/guides/troubleshooting.md"
"""Named under the error that ends a run; a mistake of the user says what to do by itself."""


def launch[ConfigT: MasterConfig | EvalMasterConfig](
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
        run: does the work; called with the checked configuration.
        arguments: command line without the program, `sys.argv` by default.

    Returns:
        Exit status.
    """
    leave_at_once()
    # torchdata calls it on import of every loader; nothing a user could change.
    warnings.filterwarnings("ignore", message=".*set_vital.*")
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=default_config, help="YAML file of the run")
    parser.add_argument(
        "--dry-run", action="store_true", help="say what the run would be and whether it fits its GPUs; start nothing"
    )
    known, overrides = parser.parse_known_args(arguments)

    def work() -> int:
        look_in_the_current_folder()
        config = load_config(known.config, overrides, schema=schema)
        if known.dry_run:
            return _dry_run(config)
        check_host(config)
        if not config.cluster.uses_gpu and is_on("fork_server", config.cluster.optimizations):
            start_fork_server(partial(_engine_libraries, config))
        check_models(config)
        run(config)
        return 0

    return exit_status(work)


def look_in_the_current_folder() -> None:
    """Let Python import from the folder that a program was started from, where a user's own classes may lie.

    Raises:
        ConfigError: the folder is gone.
    """
    try:
        folder = os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the current folder does not exist any more. Change to one that does (cd).") from error
    if folder not in sys.path:
        sys.path.append(folder)


def _engine_libraries(config: MasterConfig | EvalMasterConfig) -> Sequence[str]:
    policies = [config.policy] if isinstance(config, EvalMasterConfig) else config.models
    if all(model.generation is None or model.generation.backend != "vllm" for model in policies):
        return ()
    from nemo_rl.models.generation.vllm.settings import LIBRARIES

    return LIBRARIES


def _dry_run(config: MasterConfig | EvalMasterConfig) -> int:
    # Imported here so that a refused configuration does not wait for torch.
    from nemo_rl.algorithms.setup.dry_run import dry_run

    return dry_run(config)


def exit_status(work: Callable[[], int]) -> int:
    """Do the work of a program with its log on the console.

    Returns:
        What `work` returns, or the status of the error that ended it, after its message and notes.
    """
    try:
        configure_logging()
        return work()
    except NemoRLError as error:
        # The terminal may be gone, which is why the run ended.
        with suppress(OSError):
            notes = [*getattr(error, "__notes__", [])]
            if error.exit_status == NemoRLError.exit_status:
                notes.append(f"Causes of such errors, and what to do: {TROUBLESHOOTING}")
            sys.stderr.write("\n".join([f"\n{type(error).__name__}: {error}", *notes, ""]))
        return error.exit_status
