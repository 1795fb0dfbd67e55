"""Serve the routes on an address.

Invariants: nothing listens before the models are there, so a client that starts with the service only waits. The event
loop runs on a thread of its own, because the HTTP server would handle the signals of the main thread.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from nemo_rl.config.schema.service import ServiceConfig
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.host.guarded_http import ConnectionGuard, serve_until_cancelled
from nemo_rl.serving.http.completions import CompletionRoutes
from nemo_rl.serving.http.listings import ListingRoutes
from nemo_rl.serving.http.requests import error_response
from nemo_rl.serving.http.routes import TrainingRoutes
from nemo_rl.serving.interfaces import AdapterModels
from nemo_rl.serving.service import Service
from nemo_rl.serving.store.keys import KeyBook
from nemo_rl.utils.addresses import http_address, listener_of
from nemo_rl.utils.errors import NemoRLError

logger = logging.getLogger(__name__)

_START_S = 30.0
_END_S = 5.0
_LAST_ANSWERS_S = 0.05
"""Time in seconds for answers to clients that wait for results when the service ends."""
_IDLE_S = 60.0
"""Time in seconds for which an unused connection stays open. Heartbeats come each 10 seconds."""


def application_of(
    service: Service, tokenizer: TokenizerType | None, keys: KeyBook, guard: ConnectionGuard
) -> Starlette:
    """Return the application of a service.

    Args:
        tokenizer: of the base model, for the routes in OpenAI's form, which are left out without it.
    """
    training = TrainingRoutes(service, keys, guard)
    routes = [*training.routes(), *ListingRoutes(training, service).routes()]
    if tokenizer is not None:
        routes += CompletionRoutes(service, tokenizer, keys, guard).routes()
    handlers: dict[Any, Any] = {HTTPException: _other_path, 500: _server_error}
    return Starlette(routes=routes, exception_handlers=handlers)


@contextlib.asynccontextmanager
async def serving(
    models: AdapterModels,
    config: ServiceConfig,
    names: list[str],
    tokenizer: TokenizerType | None = None,
    on_loss: Callable[[NemoRLError], None] = lambda error: None,
) -> AsyncIterator[str]:
    """Serve for the time of a block, which gets the address.

    Args:
        models: adapters on the base model.
        config: section `service`.
        names: names of the base model that clients may use.
        tokenizer: of the base model.
        on_loss: function that is called if the models have lost a process.

    Raises:
        ConfigError: the address or a file of the section cannot be used.
    """
    keys = KeyBook(None if config.keys_file is None else Path(config.keys_file))
    service, guard = Service(models, config, names, on_loss), ConnectionGuard(idle_s=_IDLE_S)
    listener = listener_of("service", config.host, config.port)
    server = guard.server(
        application_of(service, tokenizer, keys, guard), lifespan="off", timeout_keep_alive=int(_IDLE_S)
    )
    service.start()
    task = asyncio.create_task(serve_until_cancelled(server, listener))
    try:
        async with asyncio.timeout(_START_S):
            while not server.started:
                await asyncio.sleep(0.01)
        yield http_address(config.host.strip("[]"), listener.getsockname()[1])
    finally:
        service.state.promises.give_up()
        await asyncio.sleep(_LAST_ANSWERS_S)
        task.cancel()
        await asyncio.wait({task}, timeout=_END_S)
        await service.stop()


async def _other_path(request: Request, error: HTTPException) -> Response:
    return error_response(error.status_code, f"{request.method} {request.url.path}: {error.detail}.")


async def _server_error(request: Request, error: Exception) -> Response:
    return error_response(500, f"The server could not answer: {type(error).__name__}.")
