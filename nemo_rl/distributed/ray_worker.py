"""In place of Ray's `setup_worker.py`: has the fork server start a worker, or starts it as Ray would.

    python ray_worker.py <the server's socket> <Ray's setup_worker.py> <the worker's program> <its arguments ...>

A raylet runs this as a file for each worker that it wants; nothing but the standard library is imported, since that is
what there is to save. The process ends when the worker is there: a raylet knows its workers by what they tell it.
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
    """What a process is started with.

    Attributes:
        arguments: the program's file, then its arguments.
        environment: all variables.
        folder: where it works.
        open_files: soft and hard limit of open files.
        oom_score: what the kernel adds to its score when memory runs out; a raylet has its workers end first.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    open_files: tuple[int, int]
    oom_score: str

    @classmethod
    def of_this_process(cls, arguments: Sequence[str]) -> "WorkerStart":
        """What this process was started with, but for its arguments."""
        with open(_OOM_SCORE) as file:
            score = file.read().strip()
        return cls(arguments, dict(os.environ), os.getcwd(), resource.getrlimit(resource.RLIMIT_NOFILE), score)

    def take_limits(self) -> None:
        """Give this process the limits; its score only where that asks for no privilege."""
        soft, hard = self.open_files
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with suppress(OSError), open(_OOM_SCORE, "w") as file:
            file.write(self.oom_score)


def main(path: str, setup: str, *arguments: str) -> None:
    """Start a worker."""
    own = [argument for argument in arguments if not argument.startswith((_CONTEXT, _LANGUAGE))]
    if not (own and _is_plain(arguments) and _ask(path, own)):
        os.execv(sys.executable, [sys.executable, setup, *arguments])


def _is_plain(arguments: Sequence[str]) -> bool:
    """Whether a worker runs Python on what every worker gets, with no environment of its own."""
    if f"{_LANGUAGE}PYTHON" not in arguments or arguments[0].startswith("-"):
        return False
    contexts = [argument.removeprefix(_CONTEXT) for argument in arguments if argument.startswith(_CONTEXT)]
    wanted = {name: value for context in contexts for name, value in json.loads(context or "{}").items() if value}
    return wanted.pop("py_executable", sys.executable) == sys.executable and not wanted


def _ask(path: str, arguments: Sequence[str]) -> bool:
    """Send a start to the server with this process's outputs; whether the worker is there."""
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
    """What `_ask` has sent, and descriptors of the sender's streams."""
    message, descriptors, _, _ = socket.recv_fds(connection, 1, len(_STANDARD_STREAMS))
    while part := connection.recv(_CHUNK_BYTES):
        message += part
    return WorkerStart(**json.loads(message)), descriptors


if __name__ == "__main__":
    main(*sys.argv[1:])
