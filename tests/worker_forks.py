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


@contextmanager
def workers_forked() -> Iterator[None]:
    """Let every Ray that this process starts fork its workers; the server ends with this process."""
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    socket = holder.stdout.readline().strip()
    assert socket not in ("", "None"), "the fork server did not start"
    fork_server._socket = socket
    try:
        yield
    finally:
        fork_server._socket = None
        holder.kill()
        holder.wait()
