"""Serve HTTP to clients that may be hostile: deadlines for requests, and a limit of connections.

    connection made ─► unknown ─── its client proves who it is ──► known
                          └─ the oldest is closed for a newer one, if there are too many

Invariants: a connection has `HEADER_S` seconds for each header of a request, from its start or from the end of the
request before; clients without a proved identity never keep others out, and never use up the process's files.
"""

import asyncio
import resource
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

type Scope = MutableMapping[str, Any]
type Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
type Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
type Application = Callable[[Scope, Receive, Send], Awaitable[None]]

HEADER_S = 10.0
"""Time limit in seconds for the header of a request."""
MOST_HEADER_BYTES = 65536
"""Largest number of bytes that are read of a header."""
MOST_UNKNOWN = 256
"""Largest number of simultaneous connections whose clients have not proved their identity."""
MOST_OF_ONE = 192
"""Largest number of simultaneous connections of one known client, unless the client may have more."""
_RESERVE = 256
"""Number of files that the process can always open besides its connections."""
_BACKLOG = 128
"""Number of connections that are accepted at once, which must be less than `_RESERVE`."""


@dataclass(eq=False)
class _Line:
    """Connection of a client."""

    transport: asyncio.Transport
    """Transport of the connection."""
    owner: object | None = None
    """Identity that the client has proved, or None if it has proved none yet."""
    header_bytes: int = 0
    """Number of bytes since the end of the last request."""
    requests: int = 0
    """Number of requests that are being answered."""
    deadline: asyncio.TimerHandle | None = None
    """Timer that closes the connection if no header arrives."""

    def wait_for_header(self, seconds: float = HEADER_S) -> None:
        """Close the connection unless a request begins in time."""
        self.header_bytes = 0
        self.stop_waiting()
        self.deadline = asyncio.get_running_loop().call_later(seconds, self.transport.abort)

    def stop_waiting(self) -> None:
        """Cancel the deadline of the header."""
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


@dataclass
class ConnectionGuard:
    """Connections of one server."""

    idle_s: float = HEADER_S
    """Time limit in seconds for the next request of a known client."""
    refused: int = 0
    """Number of connections that were closed because there were too many."""
    _lines: dict[object, _Line] = field(default_factory=dict)
    """Open connections by the address of the client."""
    _owned: Counter[object] = field(default_factory=Counter)
    """Connections of each known client."""
    _unknown: dict[_Line, None] = field(default_factory=dict)
    """Connections of unknown clients, the oldest first."""

    def server(self, application: Application, **options: Any) -> uvicorn.Server:
        """Return a server of an application.

        Args:
            application: ASGI application.
            options: of `uvicorn.Config`.
        """
        guard = self

        class Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # a variable that holds a class
            """Connection that asks the guard."""

            def connection_made(self, transport: asyncio.Transport) -> None:
                self._line = guard._open(transport)
                super().connection_made(transport)

            def connection_lost(self, error: Exception | None) -> None:
                guard._close(self._line)
                super().connection_lost(error)

            def data_received(self, data: bytes) -> None:
                line = self._line
                if line.header_bytes > MOST_HEADER_BYTES and not line.requests:
                    line.transport.abort()
                    return
                line.header_bytes += len(data)
                super().data_received(data)

        config = uvicorn.Config(
            self._watched(application),
            http=Protocol,
            ws="none",
            backlog=_BACKLOG,
            proxy_headers=False,
            server_header=False,
            log_level="warning",
            access_log=False,
            **options,
        )
        return uvicorn.Server(config)

    def recognise(self, scope: Scope, owner: object, most: int = MOST_OF_ONE) -> bool:
        """Store the identity of a request's client.

        Args:
            scope: of the request.
            owner: the client; a connection may change to another one.
            most: connections that the client may have.

        Returns:
            False if the client has too many connections.
        """
        line = self._lines.get(scope.get("client"))
        if line is None or line.owner is owner:
            return True
        if self._owned[owner] >= most:
            self.refused += 1
            return False
        self._forget_owner(line)
        self._owned[owner] += 1
        line.owner = owner
        self._unknown.pop(line, None)
        return True

    def close(self, owner: object) -> None:
        """Close the connections of a client without rights on which answers are still open."""
        for line in list(self._lines.values()):
            if line.owner is owner and line.requests:
                line.transport.abort()

    def _watched(self, application: Application) -> Application:
        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            line = self._lines.get(scope.get("client"))
            if line is None:
                await application(scope, receive, send)
                return
            line.requests += 1
            line.stop_waiting()
            try:
                await application(scope, receive, send)
            finally:
                line.requests -= 1
                if line.requests == 0 and not line.transport.is_closing():
                    line.wait_for_header(HEADER_S if line.owner is None else self.idle_s)

        return watched

    def _open(self, transport: asyncio.Transport) -> _Line:
        line = _Line(transport)
        while len(self._unknown) >= _most_unknown() and self._close_oldest():
            pass
        if _is_scarce(transport) and not self._close_oldest():
            self.refused += 1
            transport.abort()
            return line
        self._lines[_client_of(transport)] = line
        self._unknown[line] = None
        line.wait_for_header()
        return line

    def _close_oldest(self) -> bool:
        """Close the oldest connection of an unknown client, and return whether there was one."""
        line = next(iter(self._unknown), None)
        if line is None:
            return False
        self.refused += 1
        line.transport.abort()
        self._close(line)
        return True

    def _close(self, line: _Line) -> None:
        line.stop_waiting()
        self._unknown.pop(line, None)
        client = _client_of(line.transport)
        if self._lines.get(client) is line:
            del self._lines[client]
        self._forget_owner(line)

    def _forget_owner(self, line: _Line) -> None:
        if line.owner is not None:
            self._owned[line.owner] -= 1
            if not self._owned[line.owner]:
                del self._owned[line.owner]
            line.owner = None


async def serve_until_cancelled(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve until the task is cancelled, and then cut all connections."""
    try:
        await server.serve(sockets=[listener])
    finally:
        for each in getattr(server, "servers", ()):  # the list does not exist before the server has started
            each.close()
        for connection in list(server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()  # otherwise the client would wait for an answer to its next request
        listener.close()


def _client_of(transport: asyncio.Transport) -> object:
    """Return the address of a client as `scope["client"]` has it."""
    address = transport.get_extra_info("peername")
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else transport


def _most_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else soft


def _most_unknown() -> int:
    return max(1, min(MOST_UNKNOWN, _most_files() // 4))


def _is_scarce(transport: asyncio.Transport) -> bool:
    """Return whether the process can open few more files. A new file gets the lowest free number."""
    most = _most_files()
    number = transport.get_extra_info("socket").fileno()
    return bool(number >= most - min(_RESERVE, most // 2))
