"""The Ray of a run: what happens if it does not start, or loses one of its own processes."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from processes_for_tests import wait_until_gone

from nemo_rl.distributed.cluster import local_ray

pytestmark = pytest.mark.ray

SETUP = """
    import os, signal, sys, threading, time
    import ray
    from nemo_rl.launch.command_line import exit_status
    from nemo_rl.distributed.cluster import local_ray
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, init_ray
    from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
    from nemo_rl.experience.event_loop import EventLoopThread
"""


def run_script(body: str) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(__file__).parent), str(Path.cwd())]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"PYTHONPATH": os.pathsep.join(paths)}
    script = textwrap.dedent(SETUP) + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=150)


@pytest.mark.parametrize(
    ("victim", "waits_for"), [pytest.param("gcs_server", "a call", marks=pytest.mark.long), ("raylet", "a rollout")]
)
def test_a_dead_ray_process_is_named_and_ends_the_run_in_order(victim: str, waits_for: str) -> None:
    done = run_script(f"""
        async def rollout(group):
            return await group.run_single_worker_single_data("stuck_in_c", 0)

        def work():
            init_ray(num_cpus=1)
            cluster = RayVirtualCluster([1], use_gpus=False)
            group = RayWorkerGroup(cluster, RayWorkerBuilder("sample_workers.Plain"))
            daemons = {{n: i[0].process.pid for n, i in ray._private.worker._global_node.all_processes.items()}}
            print("PIDS", group.worker_metadata[0]["pid"], *daemons.values(), flush=True)
            threading.Timer(0.5, os.kill, (daemons["{victim}"], signal.SIGKILL)).start()
            killed_at = time.monotonic() + 0.5
            loop = EventLoopThread()
            try:
                if "{waits_for}" == "a rollout":
                    loop.run(rollout(group), 100, "rollouts")
                group.get_all_worker_results(group.run_all_workers_single_data("stuck_in_c"), 100)
            finally:
                loop.close()
                group.shutdown("cleanup")
                cluster.shutdown()
                print("CLOSED", time.monotonic() - killed_at, flush=True)

        sys.exit(exit_status(work))
    """)
    assert done.returncode == 1, done.stderr
    role = {"gcs_server": "control service", "raylet": "node manager"}[victim]
    pids = [int(word) for word in done.stdout.split("PIDS")[1].splitlines()[0].split()]
    message = f"RayDiedError: The {role} of this run's Ray ({victim}, pid {pids[1 if victim == 'gcs_server' else 2]})"
    assert f"{message} was killed by SIGKILL; the run cannot continue without it" in done.stderr
    assert float(done.stdout.split("CLOSED")[1].split()[0]) < 60, "the deadline of the wait is 100 s"
    assert wait_until_gone(pids) == []


def test_a_stopped_daemon_counts_as_dead_only_if_it_stays_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ray, "_LOOK_PERIOD_S", 0.2)
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    assert not local_ray._await_stop(ended)
    daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(daemon.pid, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (daemon.pid, signal.SIGCONT)).start()
        threading.Timer(1.5, os.kill, (daemon.pid, signal.SIGSTOP)).start()
        started = time.monotonic()
        assert local_ray._await_stop(daemon)
        assert time.monotonic() - started > 1.5, "a pause is not the end"
    finally:
        daemon.kill()
        daemon.wait()


@pytest.mark.long  # on a busy machine Ray's C++ may win the race of two threads
def test_a_dead_ray_process_is_logged_before_ray_ends_the_driver() -> None:
    """The next use of the object store ends the process from C++: no exception, no cleanup, no message."""
    done = run_script("""
        from nemo_rl.utils.logging_setup import configure_logging
        configure_logging()
        init_ray(num_cpus=1)
        raylet = ray._private.worker._global_node.all_processes["raylet"][0].process.pid
        print("RAYLET", raylet, flush=True)
        ray.put(bytes(500_000))
        os.kill(raylet, signal.SIGKILL)
        time.sleep(0.5)
        while True:
            ray.put(bytes(500_000))
            time.sleep(0.02)
    """)
    raylet = int(done.stdout.split("RAYLET")[1].split()[0])
    assert done.returncode != 0
    message = (
        f"The node manager of this run's Ray (raylet, pid {raylet}) was killed by SIGKILL; the run cannot continue"
    )
    assert message in done.stderr


@pytest.mark.long
def test_a_signal_to_all_processes_ends_a_wait_for_the_control_service() -> None:
    """It stops serving on SIGTERM but may not exit; Ray's C++ blocks on every call to it."""
    started = time.monotonic()
    done = run_script("""
        from ray.util.placement_group import placement_group_table
        init_ray(num_cpus=1)
        cluster = RayVirtualCluster([1], use_gpus=False)
        for daemon in ray._private.worker._global_node.all_processes.values():
            os.kill(daemon[0].process.pid, signal.SIGTERM)
        time.sleep(2)
        placement_group_table(cluster.get_placement_groups()[0])
    """)
    assert done.returncode == 1, done.stderr
    assert time.monotonic() - started < 50


def test_ray_outlives_the_thread_that_started_it() -> None:
    done = run_script("""
        starter = threading.Thread(target=init_ray, kwargs={"num_cpus": 1})
        starter.start()
        starter.join()
        time.sleep(1)
        local_ray.check_local_ray()
        print("ANSWER", ray.get(ray.remote(lambda: 7).remote()))
    """)
    assert "ANSWER 7" in done.stdout, done.stderr
    assert "has ended" not in done.stderr, done.stderr
    assert done.returncode == 0


def test_ray_is_started_again_after_a_slow_start() -> None:
    done = run_script("""
        import logging
        logging.basicConfig(level=logging.WARNING)
        get_node, attempts = ray._private.services.get_node, []

        def slow_at_first(*args):
            attempts.append(args)
            if len(attempts) == 1:
                raise Exception("The current node timed out during startup.")
            return get_node(*args)

        ray._private.services.get_node = slow_at_first
        init_ray(num_cpus=1)
        print("ANSWER", ray.get(ray.remote(lambda: 7).remote()))
        ray.shutdown()

        def never(*args):
            raise Exception("The current node timed out during startup.")

        ray._private.services.get_node = never
        sys.exit(exit_status(lambda: init_ray(num_cpus=1) or 0))
    """)
    assert "ANSWER 7" in done.stdout, done.stderr
    assert "has ended" not in done.stderr, "a shutdown is no death"
    assert "Ray did not start (attempt 1 of 3): The current node timed out" in done.stderr
    assert done.returncode == 1
    assert "ResourceInsufficientError: Ray did not start on this machine in 3 attempts" in done.stderr


def test_ray_starts_after_groups_that_only_a_cache_of_dtensor_holds() -> None:
    done = run_script("""
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        for group in range(2):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            mesh = init_device_mesh("cpu", (1,))
            for size in range(1, 200):
                DTensor.from_local(torch.ones(size, size + group), mesh, [Shard(0)], run_check=False).detach()
            del mesh
            dist.destroy_process_group()
        init_ray(num_cpus=1)
        print("started")
    """)
    assert done.returncode == 0 and "started" in done.stdout, done.stderr
