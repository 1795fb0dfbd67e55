"""Run jobs of `ray.sub` with replacements for the Slurm commands."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPT = REPOSITORY / "ray.sub"
HERE = Path(__file__).parent
STAND_IN_RAY = HERE / "stand_in_ray"
NODES = ("node1", "node2", "node3")


@dataclass
class SlurmJob:
    """A running or finished job: its output and its requests to Slurm."""

    folder: Path
    process: subprocess.Popen[bytes]
    environment: dict[str, str]

    def finish(self, timeout_s: float = 60) -> int:
        """Wait for the end and return the exit status of the batch script."""
        return self.process.wait(timeout_s)

    def output(self) -> str:
        """Return the output of the batch script, over all its starts."""
        path = self.folder / "slurm-1.out"
        return path.read_text() if path.exists() else ""

    def log(self, name: str, restarts: int = 0) -> str:
        path = self.log_dir(restarts) / name
        return path.read_text() if path.exists() else ""

    def log_dir(self, restarts: int = 0) -> Path:
        return self.folder / (f"1-{restarts}-logs" if restarts else "1-logs")

    def wait_for(self, seen: Callable[[], object], timeout_s: float = 60) -> None:
        end = time.monotonic() + timeout_s
        while not seen():
            assert self.process.poll() is None and time.monotonic() < end, self.output()[-4000:]
            time.sleep(0.1)

    def signal_batch_shell(self, number: int) -> None:
        os.kill(int((self.folder / "slurm/job1/batch.pid").read_text()), number)

    def kill_task(self, node: str) -> None:
        """Send SIGKILL to what srun started on a node."""
        os.kill(int((self.folder / f"slurm/job1/{node}.pid").read_text()), signal.SIGKILL)

    def sruns(self) -> list[list]:
        """Return the arguments of each srun; the last one is its command, a list."""
        return [json.loads(line) for line in (self.folder / "slurm/job1/sruns.jsonl").read_text().splitlines()]

    def ray_arguments(self, node: str) -> list[str]:
        return (self.folder / f"slurm/ray-arguments-{node}").read_text().splitlines()

    def attach(self, *arguments: str, command: str | None = None) -> subprocess.CompletedProcess[str]:
        environment = self.environment | ({"COMMAND": command} if command else {})
        return subprocess.run(
            ["bash", self.folder / "1-attach.sh", *arguments],
            cwd="/", env=environment, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def close(self) -> None:
        """End the job and every process that it started."""
        if self.process.poll() is None:
            (self.folder / "slurm/job1/batch.pid").exists() and self.signal_batch_shell(signal.SIGKILL)
            self.process.wait(30)


def search_path(*first: Path) -> str:
    """Return PATH with the Slurm replacements and this Python, after the folders of `first`."""
    return os.pathsep.join(map(str, [*first, HERE / "stand_ins", Path(sys.executable).parent, os.environ["PATH"]]))


def script_defaults() -> dict[str, str]:
    """Return the variables that `ray.sub` reads, with their defaults as written there."""
    block = SCRIPT.read_text().partition("DEFAULTS=(")[2].partition("\n)")[0]
    return {name: value.strip('"') for name, value in re.findall(r'^  (\w+)=("[^"]*"|\S*)', block, flags=re.MULTILINE)}


def slurm_environment(folder: Path, **variables: str) -> dict[str, str]:
    """Return the environment of a user, with the state of the "cluster" in `folder`."""
    state = folder / "slurm"
    state.mkdir(parents=True, exist_ok=True)
    nodes = {
        name: {"CPUTot": "2", "NodeAddr": f"127.0.0.{number}", "Gres": variables.pop(f"GRES_{name}", "(null)")}
        for number, name in enumerate(NODES, start=2)
    }
    if "CPUS_node1" in variables:
        nodes["node1"]["CPUEfctv"] = variables.pop("CPUS_node1")
    (state / "nodes.json").write_text(json.dumps(nodes))
    hidden = ("RAY_", "SLURM", "PYTEST_", "VIRTUAL_ENV", *script_defaults())
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    return kept | {
        "PATH": search_path(),
        "SLURM_STAND_IN": str(state),
        "VIRTUAL_ENV": str(STAND_IN_RAY),
        "GPUS_PER_NODE": "0",
        "BASE_LOG_DIR": str(folder),
    } | variables  # fmt: skip


def submit(folder: Path, nodes: int = 2, **variables: str) -> SlurmJob:
    """Run `COMMAND=... sbatch --wait --nodes=N ray.sub` in a separate folder."""
    environment = slurm_environment(folder, **variables)
    process = subprocess.Popen(["sbatch", "--wait", f"--nodes={nodes}", SCRIPT], cwd=folder, env=environment)
    return SlurmJob(folder, process, environment)
