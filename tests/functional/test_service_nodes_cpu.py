"""The training service over two Ray nodes on this machine gives the bits of one node with two ranks.

pytest tests/functional/test_service_nodes_cpu.py -m long
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from example_runs import REPOSITORY
from ray_nodes import ray_nodes
from service_process import Server, free_port

pytest.importorskip("tinker")
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(3600)]

STEPS = 8


def seen_by_a_tenant(server: Server, output: Path) -> list[Any]:
    """Return the losses, tokens, log-probabilities and norms of a program with the official library."""
    environment = os.environ | {"TINKER_BASE_URL": f"http://127.0.0.1:{server.port}", "OMP_NUM_THREADS": "1"}
    program = Path(__file__).with_name("service_tenant.py")
    command = [sys.executable, str(program), "alice", "4", str(STEPS), "0", str(output)]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:] + server.log()[-3000:]
    seen: list[Any] = json.loads(output.read_text())
    return seen


def end(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.finish(120) == 0, server.log()[-3000:]


def test_two_nodes_give_the_bits_of_one(tmp_path: Path) -> None:
    threads = "cluster.threads_per_rank=1"
    one = Server.start(tmp_path / "one", free_port(), "cluster.ranks_per_node=2", threads)
    try:
        one.await_answer(900)
        expected = seen_by_a_tenant(one, tmp_path / "one.json")
        end(one)
    finally:
        one.process.kill()
    with ray_nodes(6, 6) as nodes:
        joined = {"RAY_ADDRESS": nodes.address}
        two = Server.start(tmp_path / "two", free_port(), "cluster.num_nodes=2", threads, environment=joined)
        try:
            two.await_answer(900)
            assert seen_by_a_tenant(two, tmp_path / "two.json") == expected
            end(two)
        finally:
            two.process.kill()
