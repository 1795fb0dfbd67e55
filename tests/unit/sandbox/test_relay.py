"""The relay between the connections of a program and its server."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from nemo_rl.sandbox.handover import relay


@contextlib.contextmanager
def relayed(server: socket.socket) -> Iterator[tuple[str, int]]:
    """Relay to a server, and give the address where connections are accepted."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=300)
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=relay, args=(listener, server.getsockname(), theirs))
    address = listener.getsockname()
    thread.start()
    try:
        yield address
    finally:
        theirs.shutdown(socket.SHUT_RD)
        thread.join(10)
        ours.close()
        theirs.close()
        assert not thread.is_alive()


def test_connections_beyond_the_limit_are_closed() -> None:
    with (
        contextlib.ExitStack() as opened,
        socket.create_server(("127.0.0.1", 0), backlog=300) as server,
        relayed(server) as address,
    ):
        ours = [opened.enter_context(socket.create_connection(address)) for _ in range(200)]
        time.sleep(0.5)
        server.setblocking(False)
        accepted = []
        with contextlib.suppress(BlockingIOError):
            while True:
                accepted.append(opened.enter_context(server.accept()[0]))
        assert len(accepted) == 64
        for one in (*accepted, *ours):
            one.close()
        time.sleep(0.2)
        again = opened.enter_context(socket.create_connection(address))
        again.sendall(b"x")
        server.settimeout(10)
        assert opened.enter_context(server.accept()[0]).recv(1) == b"x"


def test_open_connections_end_without_messages(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.DEBUG),
        socket.create_server(("127.0.0.1", 0)) as server,
        relayed(server) as address,
        socket.create_connection(address),
    ):
        server.accept()[0].close()
        kept = socket.create_connection(address)
        time.sleep(0.2)
    kept.close()
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING], caplog.text
