"""Measure the load of this machine: processors, memory, the processes below one process, and GPUs.

Invariant: values that cannot be measured are left out, and no reading raises an error.
"""

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from nemo_rl.host.processes import descendants, resident_bytes

_END_S = 1.0
"""Seconds that `nvidia-smi` may take to end after SIGKILL; a driver that hangs may keep the process for ever."""


def query_gpus(*fields: str, timeout_s: float = 5.0) -> list[list[str]]:
    """Return each GPU's values in the order of `fields` (`nvidia-smi --help-query-gpu`), or [] if the tool fails.

    `CUDA_VISIBLE_DEVICES` selects the GPUs. If the tool does not know the names in it, such as those of MIG instances,
    all GPUs are returned.

    Args:
        fields: names of the values; only the first one may contain commas.
        timeout_s: time limit in seconds for the answer.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
    for chosen in (["-i", visible], []) if visible else ([],):
        answer = _answer([*command, *chosen], timeout_s)
        if answer is not None:
            return [[cell.strip() for cell in line.rsplit(",", len(fields) - 1)] for line in answer.splitlines()]
    return []


def _answer(command: Sequence[str], timeout_s: float) -> str | None:
    """Return the output of a command, or None if it fails or does not end in time."""
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None
    assert process.stdout is not None
    try:
        printed, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.stdout.close()
        return None
    return printed if process.returncode == 0 else None


_STAT = Path("/proc/stat")
_MEMORY = Path("/proc/meminfo")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_GIB = 2**30


@dataclass
class MachineLoad:
    """Readings of this machine, with shares since the last reading."""

    root_pid: int
    """Process that started the processes of the run."""
    _busy: tuple[float, float] = field(default=(0.0, 0.0), init=False)
    _used: dict[int, float] = field(default_factory=dict, init=False)
    _read_at: float = field(default_factory=time.monotonic, init=False)

    def __post_init__(self) -> None:
        for prepare in (self._processors, self._processes):
            _attempt(prepare)

    def read(self) -> dict[str, float]:
        """Return the load.

        Returns:
            `cpu_util`: percent of all processors that was busy, `mem_gb` and `mem_total_gb`: memory of the machine in
            GiB, `processes.mem_gb`: memory of the run's processes without shared pages, `processes.cpu_cores`: cores
            that they kept busy, and `gpu.<j>.util` (percent), `gpu.<j>.mem_gb` and `gpu.<j>.mem_total_gb`.
        """
        found: dict[str, float] = {}
        for measure in (self._processors, _memory, self._processes, _gpus):
            found |= _attempt(measure)
        return found

    def _processors(self) -> dict[str, float]:
        numbers = [float(number) for number in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
        total, idle = sum(numbers), numbers[3] + numbers[4]
        busy_before, total_before = self._busy
        self._busy = (total - idle, total)
        passed = total - total_before
        # On some kernels, the counter of idle time may decrease a little.
        return {"cpu_util": 100 * max(0.0, total - idle - busy_before) / passed} if passed > 0 else {}

    def _processes(self) -> dict[str, float]:
        pids = [self.root_pid, *descendants(self.root_pid)]
        used = {pid: seconds for pid in pids if (seconds := _processor_seconds(pid)) is not None}
        now = time.monotonic()
        # A reused process id has less processor time than its predecessor.
        spent = sum(max(0.0, seconds - self._used.get(pid, 0.0)) for pid, seconds in used.items())
        passed, self._read_at, self._used = now - self._read_at, now, used
        found = {"processes.mem_gb": sum(map(resident_bytes, used)) / _GIB}
        return found | ({"processes.cpu_cores": spent / passed} if passed > 0 else {})


def _attempt(measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Return a measurement, or nothing if the system's file is missing or has another form."""
    try:
        return measure()
    except (OSError, ValueError, IndexError, KeyError):
        return {}


def _memory() -> dict[str, float]:
    lines = (line.split() for line in _MEMORY.read_text().splitlines())
    sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
    used = sizes["MemTotal"] - sizes["MemAvailable"]
    return {"mem_gb": used / _GIB, "mem_total_gb": sizes["MemTotal"] / _GIB}


def _processor_seconds(pid: int) -> float | None:
    """Return the processor time of a process, or None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def _gpus() -> dict[str, float]:
    """Return the load of each GPU without values that the GPU does not report, such as those of a MIG instance."""
    found: dict[str, float] = {}
    names = {"util": 1.0, "mem_gb": 1024.0, "mem_total_gb": 1024.0}
    for index, *values in query_gpus("index", "utilization.gpu", "memory.used", "memory.total"):
        for (name, unit), value in zip(names.items(), values, strict=True):
            if value.replace(".", "", 1).isdigit():
                found[f"gpu.{index}.{name}"] = float(value) / unit
    return found
