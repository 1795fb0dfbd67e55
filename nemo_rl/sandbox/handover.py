"""Let a program in a sandbox reach one server while the program runs, and read its files after it has ended.

    program ── connects ──► 127.0.0.1:port in its namespace ──► listening socket, held here ──► relay ──► server
    scratch folder ◄── descriptor, held here ── read after the end

Code inside the sandbox opens socket and folder, and sends both descriptors to this process (`jail/handover.py`). A
socket belongs to the network namespace that made it, so programs without any other network can connect to this process.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import socket
import threading
from collections.abc import Iterable
from typing import Self

from nemo_rl.host.boundary import in_background
from nemo_rl.sandbox.scratch import read_files
from nemo_rl.utils.errors import SandboxError

_CHUNK_BYTES = 65536
_MAX_CONNECTIONS = 64
"""Largest number of connections of one program at the same time. Each takes two descriptors of this process."""


def relay(listener: socket.socket, address: tuple[str, int], stopped: socket.socket) -> None:
    """Accept and relay connections until `stopped` can be read, then end all connections and close the listener.

    Args:
        address: Host and port of the server.
        stopped: Socket that another thread shuts down to end this call.
    """
    asyncio.run(_Relay(address).serve(listener, stopped))


class _Relay:
    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._num_open = 0

    async def serve(self, listener: socket.socket, stopped: socket.socket) -> None:
        server = await asyncio.start_server(self._connected, sock=listener)
        stopped.setblocking(False)
        await asyncio.get_running_loop().sock_recv(stopped, 1)
        server.close()  # `asyncio.run` cancels the connections

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection, or close it if the server cannot be reached or the limit of connections is reached."""
        if self._num_open >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._num_open += 1
        with contextlib.suppress(OSError, asyncio.CancelledError):  # otherwise asyncio logs cancelled connections
            try:
                from_server, to_server = await asyncio.open_connection(*self._address)
                try:
                    await asyncio.gather(_copy(reader, to_server), _copy(from_server, writer))
                finally:
                    to_server.close()
            finally:
                self._num_open -= 1
                writer.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy data until the source ends, and then end the stream to the target, but not the stream from it."""
    while data := await source.read(_CHUNK_BYTES):
        target.write(data)
        await target.drain()
    if target.can_write_eof():
        target.write_eof()


_RESOLVE_DEADLINE_S = 10.0
_END_DEADLINE_S = 10.0


class Handover:
    """Receive the scratch folder of one run, and relay the connections of the run on a thread until it has ended.

    Args:
        address: Host and port of the server, or None for no relay.

    Raises:
        SandboxError: The host is unknown.
    """

    def __init__(self, address: tuple[str, int] | None) -> None:
        self._address = None if address is None else _resolved(*address)
        self._outside, self._inside = socket.socketpair()
        self._folder: int | None = None
        self._thread = threading.Thread(target=self._take, name="handover of a sandbox", daemon=True)

    @property
    def inside(self) -> int:
        """The descriptor of the socket that the code inside the sandbox gets."""
        return self._inside.fileno()

    def __enter__(self) -> Self:
        """Start a thread that waits for the descriptors that the code inside the sandbox sends."""
        self._thread.start()
        return self

    def __exit__(self, *reason: object) -> None:
        """End all connections and release the folder."""
        self._end()
        if self._folder is not None:
            os.close(self._folder)

    def files(self, names: Iterable[str], max_bytes: int) -> dict[str, bytes | None]:
        """Read files that an ended program left in its folder (by `read_files`).

        Raises:
            SandboxError: The folder's descriptor did not arrive, so nothing is known of its files.
        """
        self._end()
        if self._folder is None:
            raise SandboxError("The scratch folder of a program could not be opened.")
        return read_files(self._folder, names, max_bytes)

    def _take(self) -> None:
        expected = 1 if self._address is None else 2
        _, given, _, _ = socket.recv_fds(self._outside, 1, expected)  # flags have no effect in Python 3.12
        for descriptor in given:
            os.set_inheritable(descriptor, False)
        if len(given) < expected:  # the code inside sent none, or this process may open no more files
            for descriptor in given:
                os.close(descriptor)
            return
        self._folder = given[0]
        if self._address is not None:
            relay(socket.socket(fileno=given[1]), self._address, self._outside)

    def _end(self) -> None:
        """Let the thread receive everything that was already sent, and then end the thread."""
        with contextlib.suppress(OSError):  # already closed
            self._outside.shutdown(socket.SHUT_RD)
        self._thread.join(_END_DEADLINE_S)
        if self._thread.is_alive():
            raise SandboxError(f"The connections of a program did not end within {_END_DEADLINE_S:g} s of its end.")
        self._inside.close()
        self._outside.close()


def _resolved(host: str, port: int) -> tuple[str, int]:
    """Return the numeric address of a host, so that no connection of the program waits for a slow name server."""
    found = in_background(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), "name of a sandbox's server")
    try:
        return str(found.result(_RESOLVE_DEADLINE_S)[0][4][0]), port
    except concurrent.futures.TimeoutError:
        raise SandboxError(f"The host {host!r} was not resolved within {_RESOLVE_DEADLINE_S:g} s.") from None
    except OSError as error:
        raise SandboxError(f"The host {host!r} is unknown: {error}") from None
