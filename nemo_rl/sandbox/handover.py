"""Let a program reach one server while it runs, and read its files when it has ended.

    program ── connects ──► 127.0.0.1:port in its namespace ──► listening socket, held here ──► relay ──► server
    scratch folder ◄── descriptor, held here ── read after the end

The code inside makes socket and descriptor and sends them here (`jail/handover.py`). A socket belongs to the namespace
where it was made, so a program without any network can be accepted here.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterable
from typing import Self

from nemo_rl.sandbox.relay import relay
from nemo_rl.sandbox.scratch import read_file


class Handover:
    """Takes the scratch folder of one run, and relays its connections on a thread until the run has ended.

    Args:
        address: Host and port of the server; None for no relay.
    """

    def __init__(self, address: tuple[str, int] | None) -> None:
        self._address = address
        self._outside, self._inside = socket.socketpair()
        self._folder: int | None = None
        self._thread = threading.Thread(target=self._take, name="handover of a sandbox", daemon=True)

    @property
    def inside(self) -> int:
        """The descriptor for the code inside."""
        return self._inside.fileno()

    def __enter__(self) -> Self:
        """Wait on a thread for what the code inside sends."""
        self._thread.start()
        return self

    def __exit__(self, *reason: object) -> None:
        """End all connections and forget the folder."""
        self._end()
        if self._folder is not None:
            os.close(self._folder)

    def files(self, names: Iterable[str], max_bytes: int) -> dict[str, bytes]:
        """Read files that the program, which has ended, left in its folder; those that cannot be read are left out."""
        self._end()
        if self._folder is None:
            return {}
        contents = {name: read_file(self._folder, name, max_bytes) for name in names}
        return {name: content for name, content in contents.items() if content is not None}

    def _take(self) -> None:
        message, given, _, _ = socket.recv_fds(self._outside, 1, 2)
        if not message:
            return
        self._folder = given[0]
        if self._address is not None:
            relay(socket.socket(fileno=given[1]), self._address, self._outside)

    def _end(self) -> None:
        """End the thread; it still takes what was sent before."""
        with contextlib.suppress(OSError):  # closed before
            self._outside.shutdown(socket.SHUT_RD)
        self._thread.join()
        self._inside.close()
        self._outside.close()
