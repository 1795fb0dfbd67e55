"""`nemo_rl doctor` as a user starts it: a dummy step, a container's /dev/shm, and a cluster of two nodes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from example_runs import REPOSITORY, run_environment
from ray_nodes import RayNodes, ray_nodes

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

CONFIGS = REPOSITORY / "examples/configs"
COMMAND = [sys.executable, "-m", "nemo_rl", "doctor", "--json", "--config"]


def doctor(
    config: str, *arguments: str, folder: Path, **variables: str
) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    """Return the exit status, and the findings by check and node."""
    done = subprocess.run(
        [*COMMAND, str(CONFIGS / config), *arguments],
        cwd=folder,
        env=run_environment() | variables,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.stdout.startswith("{"), done.stderr[-3000:]
    findings = json.loads(done.stdout)["findings"]
    return done.returncode, {(finding["check"], finding["node"]): finding for finding in findings}


@pytest.mark.parametrize("config", ["grpo_math_cpu.yaml", "rm_cpu.yaml", "grpo_math_cpu_megatron.yaml"])
def test_the_doctor_runs_a_dummy_step_on_real_workers(config: str, tmp_path: Path) -> None:
    status, lines = doctor(config, "--dummy-step", "cluster.ranks_per_node=2", folder=tmp_path)
    step = lines["dummy step", ""]
    assert (status, step["status"]) == (0, "ok"), step
    assert "loss " in step["found"] and "gradient norm" in step["found"]
    assert lines["exchange", ""]["found"].startswith("gloo between 2 processes")
    assert list(tmp_path.iterdir()) == []


def test_a_failing_dummy_step_is_reported(tmp_path: Path) -> None:
    """The file of weights is truncated."""
    model = tmp_path / "model"
    shutil.copytree(REPOSITORY / "examples/assets/tiny-chat", model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    status, lines = doctor("grpo_math_cpu.yaml", "--dummy-step", f"policy.model_name={model}", folder=tmp_path)
    assert status == 1
    assert lines["dummy step", ""]["status"] == "failed", lines["dummy step", ""]


def test_a_container_with_too_little_shared_memory_is_reported(tmp_path: Path) -> None:
    own_mounts = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    small = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    if subprocess.run([*own_mounts, small], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system of its own")
    config = CONFIGS / "grpo_math_cpu.yaml"
    done = subprocess.run(
        [*own_mounts, f'{small} && exec "$@"', "sh", *COMMAND, str(config)],
        cwd=tmp_path,
        env=run_environment(),
        capture_output=True,
        text=True,
        timeout=400,
    )
    failed = [line for line in json.loads(done.stdout)["findings"] if line["status"] == "failed"]
    assert done.returncode == 1
    assert [line["check"] for line in failed] == ["shared memory"]
    assert failed[0]["found"].startswith("67.1 MB free in /dev/shm")


@pytest.fixture
def two_nodes() -> Iterator[RayNodes]:
    with ray_nodes(2, 2) as nodes:
        yield nodes


def test_every_node_of_a_cluster_is_checked_and_named(two_nodes: RayNodes, tmp_path: Path) -> None:
    status, lines = doctor("grpo_math_cpu.yaml", "cluster.num_nodes=2", folder=tmp_path, RAY_ADDRESS=two_nodes.address)
    assert lines["cluster", ""]["found"].startswith(f"RAY_ADDRESS={two_nodes.address}: 2 nodes")
    assert lines["nodes", ""]["found"] == "asked: 127.0.0.2, 127.0.0.3"
    for node in ("127.0.0.2", "127.0.0.3"):
        for check in ("versions", "shared memory", "open files", "ports"):
            assert lines[check, node]["status"] in ("ok", "warning"), lines[check, node]
        assert node in lines["ports", node]["found"]
    assert lines["nodes for the run", ""]["status"] == "ok"
    assert lines["memory", ""]["numbers"]["bytes_for_a_rank"] > 0
    assert status == 0, [line for line in lines.values() if line["status"] == "failed"]


def test_a_cluster_with_too_few_nodes_is_named(two_nodes: RayNodes, tmp_path: Path) -> None:
    status, lines = doctor("grpo_math_cpu.yaml", "cluster.num_nodes=4", folder=tmp_path, RAY_ADDRESS=two_nodes.address)
    assert status == 1
    assert "2 of 2 nodes" in lines["nodes for the run", ""]["found"]
    assert "require 4" in lines["nodes for the run", ""]["found"]


def test_a_port_without_ray_is_reported_within_the_deadline(tmp_path: Path) -> None:
    """The server accepts the connection and stays silent, on all addresses because Ray replaces 127.0.0.1."""
    listen = "s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); time.sleep(300)"
    code = f"import socket, time; {listen}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as listening:
        assert listening.stdout is not None
        port = listening.stdout.readline().strip()
        try:
            status, lines = doctor("grpo_math_cpu.yaml", folder=tmp_path, RAY_ADDRESS=f"127.0.0.1:{port}")
        finally:
            os.kill(listening.pid, 9)
    assert status == 1
    assert lines["cluster", ""]["status"] == "failed"
    assert "not Ray" in lines["cluster", ""]["found"], lines["cluster", ""]
    assert lines["data", ""]["status"] == "ok"
