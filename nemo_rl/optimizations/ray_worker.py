"""Replace Ray's `setup_worker.py`: let the fork server start a worker, or start it as Ray would.

    python ray_worker.py <the server's socket> <Ray's setup_worker.py> <the worker's program> <its arguments ...>

A raylet runs this file for each worker that it needs. Only the standard library is imported, since other imports are
the cost to avoid. The process ends once the worker is forked: a raylet identifies workers by their registration.
"""

import json
import os
import resource
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

_CONTEXT = "--serialized-runtime-env-context="
_LANGUAGE = "--language="
_STANDARD_STREAMS = (0, 1, 2)
_CHUNK_BYTES = 1 << 16
_OOM_SCORE = "/proc/self/oom_score_adj"


@dataclass(frozen=True)
class WorkerStart:
    """Arguments, environment and limits of a process."""

    arguments: Sequence[str]
    """Path of the program, followed by its arguments."""
    environment: Mapping[str, str]
    """All environment variables."""
    folder: str
    """Working directory."""
    open_files: tuple[int, int]
    """Soft and hard limit of the number of open files."""
    oom_score: str
    """Kernel's adjustment of the order of killing without memory. A raylet sets it so that workers are killed first."""

    @classmethod
    def of_this_process(cls, arguments: Sequence[str]) -> "WorkerStart":
        """Describe this process, with other arguments."""
        with open(_OOM_SCORE) as file:
            score = file.read().strip()
        return cls(arguments, dict(os.environ), os.getcwd(), resource.getrlimit(resource.RLIMIT_NOFILE), score)

    def take_limits(self) -> None:
        """Apply the limits to this process, and the adjustment only if it needs no privilege."""
        soft, hard = self.open_files
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with suppress(OSError), open(_OOM_SCORE, "w") as file:
            file.write(self.oom_score)


def main(path: str, setup: str, *arguments: str) -> None:
    """Start a worker with the server, or else in this process."""
    own = [argument for argument in arguments if not argument.startswith((_CONTEXT, _LANGUAGE))]
    if not (own and _is_plain(arguments) and _ask(path, own)):
        os.execv(sys.executable, [sys.executable, setup, *arguments])


def _is_plain(arguments: Sequence[str]) -> bool:
    """Return whether a worker runs Python with the interpreter and packages of all workers."""
    if f"{_LANGUAGE}PYTHON" not in arguments or arguments[0].startswith("-"):
        return False
    contexts = [argument.removeprefix(_CONTEXT) for argument in arguments if argument.startswith(_CONTEXT)]
    wanted = {name: value for context in contexts for name, value in json.loads(context or "{}").items() if value}
    return wanted.pop("py_executable", sys.executable) == sys.executable and not wanted


def _ask(path: str, arguments: Sequence[str]) -> bool:
    """Send this process's description and standard streams to the server, and return whether it forked the worker."""
    try:
        start = WorkerStart.of_this_process(arguments)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(path)
            message = json.dumps(asdict(start)).encode()
            socket.send_fds(connection, [message[:1]], _STANDARD_STREAMS)
            connection.sendall(message[1:])
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1) == b"1"
    except OSError:
        return False


def receive_start(connection: socket.socket) -> tuple[WorkerStart, list[int]]:
    """Receive a request of `_ask`: the description, and descriptors of the sender's standard streams."""
    message, descriptors, _, _ = socket.recv_fds(connection, 1, len(_STANDARD_STREAMS))
    while part := connection.recv(_CHUNK_BYTES):
        message += part
    return WorkerStart(**json.loads(message)), descriptors


if __name__ == "__main__":
    main(*sys.argv[1:])
