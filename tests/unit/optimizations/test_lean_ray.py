"""The changes to Ray while it starts: each only where its optimization is on."""

from functools import partial
from typing import Any

import pytest

from nemo_rl.optimizations import lean_ray, ray_agents, ray_worker
from nemo_rl.optimizations.lean_ray import LeanStart, lean_start

RAYLET = [
    "/ray/raylet",
    "--session_dir=/session",
    "--node_id=7",
    "--node_ip_address=127.0.0.1",
    "--dashboard_agent_command=python agent.py",
    "--runtime_env_agent_command=python runtime_env.py",
    f"--python_worker_command=python {lean_ray._SETUP_WORKER} default_worker.py",
]


def command_of(lean: LeanStart, command: list[str]) -> list[str]:
    """The command that is started in place of a daemon's."""
    started: list[list[str]] = []
    starter: Any = lean.services["start_ray_process"]
    start = partial(lean_ray._start_process, lambda command, *_: started.append(command), *starter.args[1:])
    start(command, "raylet")
    return started[0]


def test_none_changes_nothing() -> None:
    assert lean_start("none") == lean_start([]) == lean_start(["host_allocator"]) == LeanStart()


def test_daemons_alone() -> None:
    lean = lean_start(["ray_daemons"])
    assert set(lean.node) == {"start_monitor", "start_log_monitor", "start_api_server"}
    assert lean.system_config == {"prestart_worker_first_driver": False, "enable_worker_prestart": False}
    assert lean.services == {}


def test_agents_alone_leave_the_command_of_workers_and_of_other_daemons() -> None:
    lean = lean_start(["ray_agents"])
    assert (lean.node, lean.utils, lean.system_config) == ({}, {}, {})
    command = command_of(lean, RAYLET)
    assert command[:4] == RAYLET[:4] and RAYLET[6] in command
    assert sum(ray_agents.__file__ in argument for argument in command) == 2
    assert any(argument.endswith(" python runtime_env.py") for argument in command)
    assert command_of(lean, ["/ray/gcs_server", "--port=1"]) == ["/ray/gcs_server", "--port=1"]


def test_forks_alone_leave_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_ray, "server_socket", lambda: "/forks/socket")
    command = command_of(lean_start(["fork_server"]), RAYLET)
    assert command[:6] == RAYLET[:6]
    wanted = f"--python_worker_command=python -I -S {ray_worker.__file__} /forks/socket {lean_ray._SETUP_WORKER} "
    assert command[6] == f"{wanted}default_worker.py"
