"""In place of the two agents that a raylet of Ray starts and waits for; see `local_ray`.

    python ray_agents.py dashboard <session folder> <node id>
    python ray_agents.py runtime_env <session folder> <node id> <address> <command of Ray's agent ...>

A raylet goes on once each of its agents has written the ports that it serves into files of the session. Ray's own take
two seconds for that, most of it imports, and keep 130 MB. `dashboard` writes what Ray's agent writes without its
optional packages, that it serves nothing, and then sleeps. `runtime_env` serves environments of workers, which many
runs do without: it holds a port, and becomes Ray's agent when somebody knocks; the raylet tries until that answers.

Run as a file, with nothing but the standard library. Both end with the raylet, which started them.
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
    """Write the ports; returns never."""
    # The raylet's own word: one that ended before this line has left its agent to another parent.
    parent = int(os.environ.get("RAY_RAYLET_PID") or os.getppid())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    folder = Path(session_dir)
    if kind == "dashboard":
        for name in _DASHBOARD_PORTS:
            _write_port(folder / f"{name}_{node_id}", NOT_SERVED)
        _sleep_beside(parent)
    address, *command = rest
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        _write_port(folder / f"{_RUNTIME_ENV_PORT}_{node_id}", port)
        _sleep_beside(parent, server)
    os.execv(command[0], [*command, f"--runtime-env-agent-port={port}"])


def _write_port(path: Path, port: int) -> None:
    """Write a port so that nobody reads half of it."""
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(str(port))
    partial.rename(path)


def _sleep_beside(parent: int, server: socket.socket | None = None) -> None:
    """Wait until somebody knocks at `server`; ends the process if its parent has ended before it could be noticed."""
    while os.getppid() == parent:
        if server is None:
            time.sleep(60)
        elif select.select([server], [], [], 60)[0]:
            return
    sys.exit()


if __name__ == "__main__":
    main(*sys.argv[1:])
