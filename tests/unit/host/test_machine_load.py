"""The load of this machine: processors, memory and processes for real, GPUs by a stand-in for nvidia-smi."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_rl.host import machine_load
from nemo_rl.host.machine_load import MachineLoad, query_gpus

pytestmark = pytest.mark.fast

_BURN = "import time\nheld = bytearray(200 * 2**20)\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tool on PATH that prints the file that is returned."""
    answer, tool = tmp_path / "answer", tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat {answer}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return answer


def test_gpus_are_reported_under_the_names_of_nemo_rl(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("0, 87, 40960, 81559\n1, 0, 512, 81559\n")
    found = MachineLoad(os.getpid()).read()
    assert {name: value for name, value in found.items() if name.startswith("gpu.")} == {
        "gpu.0.util": 87.0,
        "gpu.0.mem_gb": 40.0,
        "gpu.0.mem_total_gb": 81559 / 1024,
        "gpu.1.util": 0.0,
        "gpu.1.mem_gb": 0.5,
        "gpu.1.mem_total_gb": 81559 / 1024,
    }


def test_a_value_that_a_gpu_does_not_report_is_left_out(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("0, [N/A], 40960, 81559\n")
    found = MachineLoad(os.getpid()).read()
    assert "gpu.0.util" not in found and found["gpu.0.mem_gb"] == 40.0


def test_processes_below_the_root_count_with_their_memory_and_time() -> None:
    load = MachineLoad(os.getpid())
    before = load.read()
    child = subprocess.Popen([sys.executable, "-c", _BURN])
    try:
        time.sleep(0.5)
        load.read()
        started, used = time.monotonic(), _seconds_of(child.pid)
        time.sleep(1.0)
        found = load.read()
        share = (_seconds_of(child.pid) - used) / (time.monotonic() - started)
    finally:
        child.kill()
        child.wait()
    assert found["processes.mem_gb"] - before["processes.mem_gb"] == pytest.approx(200 / 1024, abs=0.1)
    assert found["processes.cpu_cores"] == pytest.approx(share, abs=0.25) and share > 0.1
    assert 0 < found["cpu_util"] <= 100
    assert 0 < found["mem_gb"] < found["mem_total_gb"]


def _seconds_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_system_without_these_files_reports_what_it_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_load, "_STAT", tmp_path / "none")
    monkeypatch.setattr(machine_load, "_MEMORY", tmp_path / "none")
    found = MachineLoad(os.getpid()).read()
    assert not {"cpu_util", "mem_gb"} & found.keys() and "processes.mem_gb" in found


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_tool_that_does_not_die_is_given_up(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that hangs keeps its caller in the kernel, where no signal reaches it."""
    (nvidia_smi.parent / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 6\n")
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: None)
    began = time.monotonic()
    assert query_gpus("index", timeout_s=0.2) == []
    assert time.monotonic() - began < 5


def test_a_process_with_the_number_of_an_ended_one_does_not_count_negatively() -> None:
    load = MachineLoad(os.getpid())
    load._used = {os.getpid(): 1e9}
    assert load.read()["processes.cpu_cores"] >= 0.0
