"""Define `nemo_rl serve`, which serves training to clients of the Tinker API.

The module imports little, so that the help appears immediately. Invariant: the line with the address is written when
clients can connect, and a stop signal ends the service with what clients were told in its files.
"""

import argparse
import asyncio
import logging
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl.host.restart_counter import RestartCounter

if TYPE_CHECKING:
    from nemo_rl.config.runs.service import ServiceMasterConfig
    from nemo_rl.data.interfaces import TokenizerType
    from nemo_rl.serving.interfaces import AdapterModels
    from nemo_rl.utils.errors import NemoRLError

logger = logging.getLogger(__name__)

NAME = "serve"
SUMMARY = "serve training to programs that use the Tinker library"
DESCRIPTION = """Serve training and sampling to programs that use the official library of the Tinker API.

FILE is a configuration, for example serve_cpu.yaml. Overrides are in Hydra's grammar (key=value).
When clients can connect, the line `Serving on http://127.0.0.1:PORT` is written. SIGTERM or Ctrl-C ends the service;
a service that is started again on the same service.state_dir continues where it was.
"""
_POLL_S = 0.1
_END_S = 60.0
_RESTARTS = 3
"""Number of starts of the models within an hour after losses of processes, unless the configuration gives one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.add_argument("--dry-run", action="store_true", help="show what would be served, and start nothing")
    parser.add_argument("config", type=Path, metavar="FILE", help="YAML file of the service")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys over those of the file")


def main(arguments: argparse.Namespace) -> int:
    """Serve until a signal and return the exit status."""
    from nemo_rl.config import load_config
    from nemo_rl.config.runs.service import ServiceMasterConfig
    from nemo_rl.host.stop_signals import leave_at_once
    from nemo_rl.launch import command_line

    def work() -> int:
        config = load_config(arguments.config, arguments.overrides, schema=ServiceMasterConfig)
        if arguments.dry_run:
            from nemo_rl.commands.service_plan import show_plan

            show_plan(config)
            return 0
        return serve(config, _open_models)

    leave_at_once()
    return command_line.exit_status(work)


def _open_models(config: "ServiceMasterConfig") -> "tuple[AdapterModels, Callable[[], None]]":
    from nemo_rl.serving.models import open_models

    service = config.service
    models = open_models(
        config.policy, config.cluster, service.seed, max_rank=service.max_rank, fused_models=service.fused_models
    )
    return models, models.close


def serve(
    config: "ServiceMasterConfig",
    open_models: "Callable[[ServiceMasterConfig], tuple[AdapterModels, Callable[[], None]]]",
) -> int:
    """Serve until a stop signal, and return the exit status.

    If a process of the models dies, all of them are started again, and the service continues from its files. Clients
    notice a delay only.

    Args:
        open_models: function that starts the models, and returns them and a function that ends them.

    Raises:
        ConfigError: a key cannot be used. No process was started.
        WorkerDiedError: processes of the models have died more often than `cluster.max_run_restarts` allows.
        RayDiedError: Ray has lost a process. A service that is started again continues.
    """
    from nemo_rl.commands.service_checks import check_before_start
    from nemo_rl.data.tokenizer import get_tokenizer
    from nemo_rl.models.huggingface.tensor_files import download_models
    from nemo_rl.serving.store.base import note_base
    from nemo_rl.utils.errors import RayDiedError

    check_before_start(config)
    download_models([config.policy.model_name])
    note_base(Path(config.service.state_dir), config.policy)
    tokenizer = get_tokenizer(config.policy.tokenizer)
    allowed = config.cluster.max_run_restarts
    restarts, stop = RestartCounter(_RESTARTS if allowed is None else allowed), threading.Event()
    while (loss := _serve_until_loss(config, open_models, tokenizer, stop, is_first=restarts.number == 0)) is not None:
        restarts.add()
        if isinstance(loss, RayDiedError) or restarts.are_too_many:
            raise loss
        logger.warning("Restart %d within an hour: all ranks and engines are started again. %s", restarts.number, loss)
    return 0


def _serve_until_loss(
    config: "ServiceMasterConfig",
    open_models: "Callable[[ServiceMasterConfig], tuple[AdapterModels, Callable[[], None]]]",
    tokenizer: "TokenizerType",
    stop: threading.Event,
    *,
    is_first: bool,
) -> "NemoRLError | None":
    """Serve until a stop signal, or until the models lose a process, and return the error of the loss.

    A process that dies while models are started again is such a loss. At the first start, it is an error.
    """
    from nemo_rl.host.boundary import in_background
    from nemo_rl.serving.http.server import serving
    from nemo_rl.utils.errors import WorkerDiedError

    try:
        models, close = open_models(config)
    except WorkerDiedError as error:
        if is_first:
            raise
        return None if stop.is_set() else error
    ended, losses = threading.Event(), list["NemoRLError"]()

    def end_after(error: "NemoRLError") -> None:
        losses.append(error)
        ended.set()

    async def run() -> None:
        async with serving(models, config.service, config.served_names, tokenizer, end_after) as address:
            # The same port after the next start, if it was a free one.
            config.service.port = int(address.rpartition(":")[2])
            sys.stdout.write(f"Serving on {address}\n")
            sys.stdout.flush()
            while not (stop.is_set() or ended.is_set()):
                await asyncio.sleep(_POLL_S)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    running = in_background(lambda: asyncio.run(run()), "service")
    try:
        while not (running.done() or stop.is_set() or ended.wait(_POLL_S)):
            pass
        running.result(_END_S)
    finally:
        close()
    return losses[0] if losses and not stop.is_set() else None
