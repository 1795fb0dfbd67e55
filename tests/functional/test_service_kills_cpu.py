"""Kill processes of the training service at random moments: tenants get the bits that they get without.

pytest tests/functional/test_service_kills_cpu.py -m long
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from example_runs import REPOSITORY
from safetensors import safe_open
from service_process import Server, free_port

pytest.importorskip("tinker")
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(5400)]

NUM_KILLS = int(os.environ.get("NRL_SERVICE_KILLS", "50"))
SEED = 11
LONGEST_WAIT_S = 3.0
"""A process is killed up to so many seconds after all tenants have made progress."""
LONGEST_PROGRESS_S = 20.0
"""Time after which a process is killed even if a tenant has made no progress. The library asks each 30 s at last."""
RESIDENT = "service.max_resident_models={}"
PAUSE_S = 6.0
"""Pause of the tenants after a step, so that they live as long as the kills."""
VICTIMS = {
    "server": (),
    "rank": ("ray::PolicyRank", "ray::AdapterRank", "ray::served_rank"),
    "engine": ("ray::GenerationWorker", "ray::served_engine"),
}
TENANTS = {"alice": 4, "bob": 8, "carol": 2}
"""Names and ranks of adapters."""
STEPS = 16 + NUM_KILLS


def start_tenants(port: int, folder: Path, pause_s: float) -> list[subprocess.Popen[bytes]]:
    """Start the programs of all tenants."""
    program = Path(__file__).with_name("service_tenant.py")
    environment = os.environ | {"TINKER_BASE_URL": f"http://127.0.0.1:{port}", "OMP_NUM_THREADS": "1"}
    started = []
    for name, rank in TENANTS.items():
        with (folder / f"{name}.log").open("wb") as output:
            arguments = [name, str(rank), str(STEPS), str(pause_s), str(folder / f"{name}.json")]
            started.append(
                subprocess.Popen(
                    [sys.executable, str(program), *arguments],
                    env=environment,
                    cwd=REPOSITORY,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    return started


def tensors_of(folder: Path, name: str) -> dict[str, bytes]:
    """The weights and the state of the optimizer in the last checkpoint of a tenant."""
    model = (folder / f"{name}.log").read_text().rpartition("MODEL ")[2].strip()
    checkpoint = folder / "state/checkpoints" / model.replace(":", "-") / "weights/end"
    found = {}
    for file in sorted(checkpoint.rglob("*.safetensors")):
        with safe_open(file, "np") as tensors:
            for key in tensors.keys():  # noqa: SIM118  # no mapping
                found[f"{file.name} {key}"] = tensors.get_tensor(key).tobytes()
    assert found
    return found


def results(folder: Path) -> dict[str, Any]:
    return {name: [json.loads((folder / f"{name}.json").read_text()), tensors_of(folder, name)] for name in TENANTS}


def progress(folder: Path) -> Counter[str]:
    """The number of log lines of each session, which belongs to one tenant."""
    lines: Counter[str] = Counter()
    for log in folder.glob("state/models/*/log.jsonl"):
        lines[log.parent.name.partition("-")[0]] += log.read_bytes().count(b"\n")
    return lines


def await_progress(folder: Path, tenants: list[subprocess.Popen[bytes]]) -> None:
    """Wait until each tenant that runs has executed something, but not for long."""
    before, end = progress(folder), time.monotonic() + LONGEST_PROGRESS_S
    while time.monotonic() < end:
        moved = sum(number > before[session] for session, number in progress(folder).items())
        if moved >= sum(tenant.poll() is None for tenant in tenants):
            return
        time.sleep(0.1)


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are killed after the test."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        if process.poll() is None:
            with_children = [*psutil.Process(process.pid).children(recursive=True), process]
            for each in with_children:
                each.kill()


def test_tenants_get_the_same_bits_whatever_is_killed(tmp_path: Path, processes: list[Any]) -> None:
    calm = tmp_path / "calm"
    server = Server.start(calm, free_port(), RESIDENT.format(16))
    processes.append(server.process)
    server.await_answer()
    tenants = start_tenants(server.port, calm, 0.0)
    processes += tenants
    for name, tenant in zip(TENANTS, tenants, strict=True):
        assert tenant.wait(900) == 0, (calm / f"{name}.log").read_text()[-3000:]
    server.process.send_signal(signal.SIGTERM)
    assert server.finish(60) == 0, server.log()[-3000:]
    expected = results(calm)

    killed, folder, draws = Counter[str](), tmp_path / "killed", random.Random(SEED)
    server = Server.start(folder, free_port(), RESIDENT.format(2))
    processes.append(server.process)
    server.await_answer()
    tenants = start_tenants(server.port, folder, PAUSE_S)
    processes += tenants
    while killed.total() < NUM_KILLS:
        server.await_answer()
        await_progress(folder, tenants)
        time.sleep(draws.uniform(0, LONGEST_WAIT_S))
        victim = draws.choice(list(VICTIMS))
        if all(tenant.poll() is not None for tenant in tenants):
            break
        if victim == "server":
            server.end()
            assert server.survivors(60) == []
            server = Server.start(folder, server.port, RESIDENT.format(2))
            processes.append(server.process)
        elif not server.processes(*VICTIMS[victim]):
            continue  # the models are being started
        else:
            server.kill(*VICTIMS[victim])
        killed[victim] += 1
    for name, tenant in zip(TENANTS, tenants, strict=True):
        assert tenant.wait(900) == 0, (folder / f"{name}.log").read_text()[-3000:]
    assert killed.total() == NUM_KILLS, f"the tenants were done after {killed}"
    found = results(folder)
    for name in TENANTS:
        assert found[name] == expected[name], name
    server.process.send_signal(signal.SIGTERM)
    assert server.finish(60) == 0, server.log()[-3000:]
    assert server.survivors() == []
