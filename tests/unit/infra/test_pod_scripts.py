"""The preStop hook lets a run finish its step and waits for the last actor, on replacement processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from manifests import FOLDER

DRIVER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (open("signals", "a").write("TERM "), time.sleep(0.5), sys.exit(75)))
open("started", "w").close()
time.sleep(60)
"""
STATUS_OF_A_STOP = 75


@pytest.fixture
def pod(tmp_path, monkeypatch):
    """Make a folder for a pod: its process id file, and a pgrep that sees this test's children only."""
    pgrep = tmp_path / "bin/pgrep"
    pgrep.parent.mkdir()
    pgrep.write_text(f'#!/bin/sh\nexec /usr/bin/pgrep --parent {os.getpid()} "$@"\n')
    pgrep.chmod(0o755)
    monkeypatch.setenv("PATH", f"{pgrep.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("NRL_DRIVER_PID_FILE", str(tmp_path / "driver.pid"))
    monkeypatch.setenv("NRL_LAST_LOOK_S", "0.1")
    return tmp_path


def titled(title: str, seconds: float) -> subprocess.Popen:
    """Start a process that sleeps under another name; wait until it has the name."""
    process = subprocess.Popen(["bash", "-c", f"exec -a '{title}' sleep {seconds}"])
    name = Path(f"/proc/{process.pid}/cmdline")
    deadline = time.monotonic() + 20
    while not name.read_bytes().startswith(title.encode()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def stop() -> None:
    """Run the script that ends with the pod's processes; it would wait two minutes for the agents below."""
    subprocess.run([FOLDER / "stop_run.sh"], check=True, timeout=60, capture_output=True)


def test_the_driver_gets_one_signal_and_time_for_its_checkpoint(pod):
    driver = subprocess.Popen([FOLDER / "run_driver.sh", sys.executable, "-c", DRIVER], cwd=pod)
    deadline = time.monotonic() + 20
    while not (pod / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (pod / "driver.pid").read_text().strip() == str(driver.pid)
    stopping = subprocess.Popen([FOLDER / "stop_run.sh"])
    # A zombie still accepts signals, so the test waits for the driver as Ray's supervisor does.
    assert driver.wait(timeout=20) == STATUS_OF_A_STOP
    assert (pod / "signals").read_text() == "TERM "
    assert stopping.wait(timeout=20) == 0


def test_a_pod_stays_until_its_actors_have_ended(pod):
    agents = [titled("ray::DashboardAgent", 120), titled("ray::RuntimeEnvAgent", 120), titled("ray::IDLE", 120)]
    try:
        stop()
        actor = titled("ray::PolicyWorker.train", 2)
        stop()
        assert actor.poll() is not None
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


def test_a_driver_that_has_ended_is_not_waited_for(pod):
    ended = subprocess.Popen(["true"])
    ended.wait()
    (pod / "driver.pid").write_text(str(ended.pid))
    stop()


def test_the_process_titles_are_those_of_ray():
    """Titles of the processes that Ray keeps on every node, and of a worker without a task."""
    from ray._private import ray_constants

    script = (FOLDER / "stop_run.sh").read_text()
    titles = [*ray_constants.AGENT_PROCESS_LIST, ray_constants.WORKER_PROCESS_TYPE_IDLE_WORKER]
    assert titles and [title for title in titles if title.removeprefix("ray::") not in script] == []
