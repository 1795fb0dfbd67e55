"""Copy bytes between the connections of a listening socket and one server.

Invariant: it connects to the one address that it was given, whatever a program sends.
"""

import asyncio
import contextlib
import socket

_CHUNK_BYTES = 65536
_MAX_CONNECTIONS = 64
"""Connections of one program at the same time. Each takes two descriptors of this process, which runs many programs."""


def relay(listener: socket.socket, address: tuple[str, int], stopped: socket.socket) -> None:
    """Accept and relay connections until another socket can be read; end them then, and close the listening socket.

    Args:
        listener: The listening socket.
        address: Host and port of the server.
        stopped: Shut down from another thread to end this call.
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
        """Relay one connection; without the server, and beyond the limit, it is closed."""
        if self._num_open >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._num_open += 1
        with contextlib.suppress(OSError, asyncio.CancelledError):  # asyncio would log a cancelled one
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
    """Copy until the source ends, then end the target in this direction only."""
    while data := await source.read(_CHUNK_BYTES):
        target.write(data)
        await target.drain()
    if target.can_write_eof():
        target.write_eof()
