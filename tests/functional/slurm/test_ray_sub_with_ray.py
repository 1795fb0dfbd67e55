"""`ray.sub` with real Ray nodes on loopback addresses: they join, a run trains, is preempted and resumes."""

import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from slurm_jobs import REPOSITORY, SlurmJob, submit

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]

PORTS = ["PORT", "RAY_CLIENT_SERVER_PORT", "DASHBOARD_PORT", "NODE_MANAGER_PORT", "OBJECT_MANAGER_PORT"]
PORTS += ["RUNTIME_ENV_AGENT_PORT", "DASHBOARD_AGENT_GRPC_PORT", "METRICS_EXPORT_PORT", "DASHBOARD_AGENT_LISTEN_PORT"]
"""Of head and worker, which share this machine: the script gives the head the next port of each kind."""


@pytest.fixture
def real_ray() -> Iterator[dict[str, str]]:
    """Return the variables of a job that uses the Ray of this environment, on free ports."""
    # Ray needs short paths for its sockets.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    with ExitStack() as taken:
        free = [pair_of_free_ports(taken) for _ in PORTS]
    ports = {name: str(port) for name, port in zip(PORTS, free, strict=True)}
    # Other tests may fill the memory of this machine, and Ray would end workers of this one.
    ports["RAY_memory_monitor_refresh_ms"] = "0"
    yield ports | {"VIRTUAL_ENV": sys.prefix, "RAY_TMPDIR": folder, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    shutil.rmtree(folder, ignore_errors=True)


def pair_of_free_ports(taken: ExitStack) -> int:
    while True:
        first = taken.enter_context(socket.socket())
        first.bind(("", 0))
        port = first.getsockname()[1]
        try:
            taken.enter_context(socket.socket()).bind(("", port + 1))
        except OSError:
            continue
        return port


def test_two_nodes_join_and_a_lost_node_is_named(tmp_path, real_ray):
    look = (
        "import json, ray, sys, time; ray.init(logging_level='ERROR');"
        "print('seen', json.dumps({n['NodeName']: n['Resources'] for n in ray.nodes()}), flush=True)\n"
        "while sum(n['Alive'] for n in ray.nodes()) == 2: time.sleep(0.5)\n"
        "sys.exit(3)"
    )
    job = submit(tmp_path, COMMAND=f'python -c "{look}"', RAY_LOG_SYNC_FREQUENCY="1", **real_ray)
    try:
        job.wait_for(lambda: "seen" in job.log("ray-driver.log"), timeout_s=200)
        nodes = json.loads(job.log("ray-driver.log").partition("seen ")[2].splitlines()[0])
        assert {name: resources["slurm_managed_ray_cluster"] for name, resources in nodes.items()} == {
            "node1": 1, "node2": 1,
        }  # fmt: skip
        kill_raylet(job, "node2")
        assert job.finish(200) == 3, job.output()
        assert "Node node2 has ended (node2: task 0: Exited with exit code 1)" in job.output()
        assert "raylet [exit code=-9]" in job.output()
        assert any(job.log_dir().glob("ray/node1/session_*/logs/gcs_server.out"))
    finally:
        job.close()


def kill_raylet(job: SlurmJob, node: str) -> None:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        mine = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_STAND_IN={job.folder}/slurm".encode()} <= set(environment)
        if mine and words[0].endswith(b"/raylet"):
            os.kill(int(process.name), signal.SIGKILL)
            return
    raise AssertionError(f"{node} has no raylet")


def test_the_cpu_example_resumes_from_its_checkpoint_after_preemption(tmp_path, real_ray):
    command = (
        f"python {REPOSITORY}/examples/run_grpo.py --config {REPOSITORY}/examples/configs/grpo_math_cpu.yaml "
        f"policy.model_name={REPOSITORY}/examples/assets/tiny-chat grpo.max_num_steps=6 grpo.val_period=0 "
        "cluster.num_nodes=2 cluster.threads_per_rank=1 grpo.val_at_start=false "
        "checkpointing.checkpoint_dir=checkpoints logger.log_dir=metrics"
    )
    job = submit(tmp_path, COMMAND=command, CPUS_PER_WORKER="4", **real_ray)
    try:
        job.wait_for(lambda: "step 2/6" in job.log("ray-driver.log"), timeout_s=300)
        job.signal_batch_shell(signal.SIGUSR1)
        assert job.finish(500) == 0, job.output() + job.log("ray-driver.log")[-2000:]
    finally:
        job.close()
    first, second = job.log("ray-driver.log"), job.log("ray-driver.log", restarts=1)
    saved = re.search(r"The checkpoint of step (\d) is", first)
    assert saved is not None, first[-2000:]
    assert "Resuming from" in second and f"step_{saved[1]}" in second
    assert "COMMAND has ended with status 75" in job.output()
    assert (tmp_path / "checkpoints/step_6").is_dir()
    for restarts in (0, 1):
        assert {"ray-head.log", "ray-worker-000.log", "ray-driver.log"} <= {
            path.name for path in job.log_dir(restarts).iterdir()
        }
