"""One process for a whole test session that has imported the libraries of Ray's workers, and forks them.

A run of an example starts such a server in its own process before it has threads; the process of the tests has imported
torch and Ray long before. `needs_own_start` and `_read_before` of `fork_server` decide as in a run which workers Ray
starts itself.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from nemo_rl.optimizations import fork_server

_HOLDER = """
import sys
from nemo_rl.optimizations.fork_server import server_socket, start_fork_server

def engine_libraries():
    from nemo_rl.models.generation.vllm.settings import LIBRARIES  # imports torch, so not sooner
    return LIBRARIES

start_fork_server(engine_libraries)
print(server_socket(), flush=True)
sys.stdin.read()
"""


_PROGRAM = """
import os, runpy, sys
from nemo_rl.optimizations import fork_server
fork_server._socket, *sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class WorkerForks:
    """The server.

    Args:
        socket: path of its socket.
    """

    def __init__(self, socket: str) -> None:
        self._socket = socket

    def command(self, program: str, *arguments: str) -> list[str]:
        """Return the command of a program that imports torch by itself, so that its Ray forks workers too."""
        return [sys.executable, "-c", _PROGRAM, self._socket, program, *arguments]


@contextmanager
def workers_forked() -> Iterator[WorkerForks]:
    """Let every Ray that this process starts fork its workers; the server ends with this process."""
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    socket = holder.stdout.readline().strip()
    assert socket not in ("", "None"), "the fork server did not start"
    fork_server._socket = socket
    try:
        yield WorkerForks(socket)
    finally:
        fork_server._socket = None
        holder.kill()
        holder.wait()
