"""Serve the page of one run, also during the run.

    reading (a thread, at most each second) ─► RunView ─► /KEY/  /KEY/news  /KEY/samples  /KEY/samples/N

Invariants: files of the run are only read. The answer to a request without the key contains nothing about the run.
"""

import asyncio
import contextlib
import errno
import logging
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

import nemo_rl
from nemo_rl.commands.report.page import as_json, make_page
from nemo_rl.commands.report.run_files import RunFiles
from nemo_rl.commands.report.run_view import RunView
from nemo_rl.commands.report.samples import READ_ERRORS, SampleQuery
from nemo_rl.host.guarded_http import ConnectionGuard
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)

_READ_EVERY_S = 1.0
_LARGEST_SHARE = 0.05
"""Largest share of the time in which a running run is read, except for samples that were there before."""
_FILES_AT_ONCE = 4
"""Number of files of samples that are read at a time. Requests are answered in between."""
_MOST_DIGITS = 12
_MOST_PORTS = 20
"""Number of ports that are tried."""
_WAIT_S = 2.0
"""Number of seconds after which a request for news is answered even if there are none."""
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


class RunServer:
    """Application that shows one run."""

    def __init__(self, run: RunFiles) -> None:
        self.key = secrets.token_urlsafe(16)
        """First part of each path."""
        self.guard = ConnectionGuard()
        self._view = RunView(run)
        self._lock = threading.Lock()
        self._version = 0
        self._status: dict[str, Any] = {}
        self._error: str | None = None
        self._changed = asyncio.Event()

    def application(self) -> Starlette:
        """Return the application, which reads the run's files while it is served."""
        routes = [
            Route("/{key}/", self._page),
            Route("/{key}/news", self._news),
            Route("/{key}/samples", self._samples),
            Route("/{key}/samples/{number}", self._sample),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        reading = asyncio.create_task(self._read())
        try:
            yield
        finally:
            reading.cancel()

    async def _read(self) -> None:
        while True:
            started = time.perf_counter()
            if await self._in_thread(self._read_once):
                self._version += 1
                self._changed.set()
                self._changed = asyncio.Event()
            took_s = time.perf_counter() - started
            await asyncio.sleep(0 if self._view.samples.has_more else max(_READ_EVERY_S, took_s / _LARGEST_SHARE))

    def _read_once(self) -> bool:
        """Read new data and return whether the page has changed. If reading fails, a later call tries again."""
        record, error = self._view.run.record(), None
        has_news = record != self._status
        self._status = record
        try:
            has_news = self._view.read(_FILES_AT_ONCE) or has_news
            error = self._view.samples.error
        except READ_ERRORS as problem:
            error = f"{type(problem).__name__}: {problem}"
            if error != self._error:
                logger.warning("The run cannot be read for the moment: %s", error)
        has_news = has_news or error != self._error
        self._error = error
        return has_news

    async def _in_thread[T](self, work: Callable[[], T]) -> T:
        """Call a function on a thread, one call at a time."""

        def locked() -> T:
            with self._lock:
                return work()

        return await asyncio.to_thread(locked)

    def _check(self, request: Request) -> None:
        if not secrets.compare_digest(str(request.path_params["key"]).encode(), self.key.encode()):
            raise HTTPException(404)
        if not self.guard.recognise(request.scope, self):
            raise HTTPException(429)

    async def _page(self, request: Request) -> Response:
        self._check(request)

        def page() -> str:
            run = self._view.as_json()
            about = {"live": True, "version": nemo_rl.__version__, "written": time.time(), "news": self._version}
            about["error"] = self._error
            return make_page({"runs": [run], **about})

        return HTMLResponse(await self._in_thread(page), headers=_HEADERS)

    async def _news(self, request: Request) -> Response:
        self._check(request)
        if request.query_params.get("after") == str(self._version):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _WAIT_S)

        def news() -> dict[str, Any]:
            if request.query_params.get("after") == str(self._version):
                return {"version": self._version}
            about = {"version": self._version, "written": time.time(), "error": self._error}
            return {**about, "run": self._view.as_json()}

        return _json(await self._in_thread(news))

    async def _samples(self, request: Request) -> Response:
        self._check(request)
        try:
            query = SampleQuery.of(request.query_params)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        return _json(await self._in_thread(lambda: self._view.samples.select(query)))

    async def _sample(self, request: Request) -> Response:
        self._check(request)
        text = request.path_params["number"]
        number = int(text) if text.isdecimal() and len(text) < _MOST_DIGITS else -1
        try:
            return _json(await self._in_thread(lambda: self._view.detail(number)))
        except (IndexError, *READ_ERRORS) as error:
            raise HTTPException(404, f"sample {number} cannot be read: {type(error).__name__}") from error


def serve(run: RunFiles, host: str, port: int) -> None:
    """Serve the page of a run until a signal ends the program.

    Args:
        host: address to listen on.
        port: first port to try; the next free one is used, and 0 takes any free port.

    Raises:
        ConfigError: the address cannot be used.
    """
    listening = listener(host, port)
    server = RunServer(run)
    address = f"http://{host}:{listening.getsockname()[1]}/{server.key}/"
    logger.info("%s is shown at %s (end with Ctrl-C)", run.name, address)
    serving = server.guard.server(server.application(), timeout_graceful_shutdown=3)
    with contextlib.suppress(KeyboardInterrupt):
        serving.run(sockets=[listening])


def listener(host: str, port: int) -> socket.socket:
    """Listen on a port, or on one of the next ports if it is in use."""
    last = port + _MOST_PORTS - 1
    while True:
        try:
            return socket.create_server((host, port))
        except (OSError, OverflowError) as error:
            if not (isinstance(error, OSError) and error.errno == errno.EADDRINUSE and port < last):
                raise ConfigError(
                    f"Cannot listen on {host}:{port}: {error}. Choose another --port; 0 takes a free one."
                ) from error
        port += 1


def _json(value: Any) -> Response:
    return Response(as_json(value), media_type="application/json", headers=_HEADERS)
