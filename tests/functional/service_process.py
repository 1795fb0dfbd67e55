"""`nemo_rl serve` as a process of a test."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from example_runs import REPOSITORY, ExampleRun


class Server(ExampleRun):
    """`nemo_rl serve` on a port and a folder."""

    port: int
    group: int

    @classmethod
    def start(cls, folder: Path, port: int, *overrides: str, environment: Mapping[str, str] | None = None) -> "Server":
        folder.mkdir(parents=True, exist_ok=True)
        log_path = folder / f"console_{time.monotonic_ns()}.log"
        keys = {
            "service.port": port,
            "service.state_dir": folder / "state",
            "service.log_dir": "null",
            "service.state_every": 3,
            "cluster.max_run_restarts": 1000,
            "cluster.max_actor_restarts": 1000,
        }
        command = [sys.executable, "-m", "nemo_rl", "serve", str(REPOSITORY / "examples/configs/serve_cpu.yaml")]
        command += [f"{key}={value}" for key, value in keys.items()] + [*overrides]
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        with log_path.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": path} | dict(environment or {}),
                process_group=0,
            )
        server = cls(process, log_path, folder)
        server.port = port
        return server

    def answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def await_answer(self, seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while not self.answers():
            assert self.process.poll() is None, self.log()[-4000:]
            assert time.monotonic() < end, self.log()[-4000:]
            time.sleep(0.1)

    def end(self) -> None:
        """End the process group at once."""
        self.processes()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
