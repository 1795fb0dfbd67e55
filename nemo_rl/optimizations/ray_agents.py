"""Replace the two agents that a raylet of Ray starts and waits for (for `lean_ray`).

    python ray_agents.py dashboard <session folder> <node id>
    python ray_agents.py runtime_env <session folder> <node id> <address> <command of Ray's agent ...>

A raylet continues once each of its agents has written its ports into files of the session. Ray's own agents take two
seconds for that, mostly imports, and keep 130 MB. `dashboard` writes that it serves nothing, as Ray's agent does
without its optional packages, and then sleeps. `runtime_env` serves environments of workers, which many runs do not
need: it holds a port, and becomes Ray's agent on the first connection; the raylet retries until Ray's agent answers.

The file runs as a program and imports only the standard library. Both agents end when the raylet, their parent, ends.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

NOT_SERVED = -1
_DASHBOARD_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
_RUNTIME_ENV_PORT = "runtime_env_agent_port"
_PR_SET_PDEATHSIG = 1


def main(kind: str, session_dir: str, node_id: str, *rest: str) -> None:
    """Write the ports and wait, without ever returning."""
    # `os.getppid()` would be wrong if the raylet has ended already.
    parent = int(os.environ["RAY_RAYLET_PID"])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    folder = Path(session_dir)
    if kind == "dashboard":
        for name in _DASHBOARD_PORTS:
            _write_port(folder / f"{name}_{node_id}", NOT_SERVED)
        _wait_for_connection(parent)
    address, *command = rest
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        _write_port(folder / f"{_RUNTIME_ENV_PORT}_{node_id}", port)
        _wait_for_connection(parent, server)
    os.execv(command[0], [*command, f"--runtime-env-agent-port={port}"])


def _write_port(path: Path, port: int) -> None:
    """Write a port in one step, so that no process reads a part of it."""
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(str(port))
    partial.rename(path)


def _wait_for_connection(parent: int, server: socket.socket | None = None) -> None:
    """Wait for a connection to `server`, and exit if the raylet `parent` ends first.

    The raylet can end before the kernel is told to end this process with it.
    """
    while os.getppid() == parent:
        if server is None:
            time.sleep(60)
        elif select.select([server], [], [], 60)[0]:
            return
    sys.exit()


if __name__ == "__main__":
    main(*sys.argv[1:])
