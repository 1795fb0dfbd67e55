"""Start the run's own Ray with fewer and smaller processes.

    autoscaler monitor, log monitor, dashboard       left out: 300 MB and seconds of a laptop's start
    an idle worker for each core                     left out: a run knows which workers it needs
    two agents of the raylet                         replaced by `ray_agents`: 130 MB, two seconds of each start
    workers                                          forked by `fork_server`, where this process has one

The omitted daemons are for monitoring a cluster, and for machines that join and leave; actors, tasks and objects work
as before. Ray has no public switch for any of these, so `distributed.cluster.local_ray` replaces the parts of Ray that
`lean_start` returns while Ray starts.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import services
from ray._private.node import Node

from nemo_rl.optimizations import ray_agents, ray_worker
from nemo_rl.optimizations.fork_server import server_socket
from nemo_rl.optimizations.switch import Choice, is_on

_UNUSED_DAEMONS = ("start_monitor", "start_log_monitor", "start_api_server")
_NO_IDLE_WORKERS = {"prestart_worker_first_driver": False, "enable_worker_prestart": False}
_SETUP_WORKER = str(Path(ray.__file__).parent / "_private" / "workers" / "setup_worker.py")


@dataclass(frozen=True)
class LeanStart:
    """Changes to Ray while it starts."""

    node: Mapping[str, Any] = field(default_factory=dict)
    """Methods of `ray._private.node.Node`, by name."""
    services: Mapping[str, Any] = field(default_factory=dict)
    """Functions of `ray._private.services`, by name."""
    utils: Mapping[str, Any] = field(default_factory=dict)
    """Functions of `ray._private.utils`, by name."""
    system_config: Mapping[str, Any] = field(default_factory=dict)
    """Entries of Ray's system configuration."""


def lean_start(choice: Choice) -> LeanStart:
    """Return the changes that a choice of optimizations requests.

    Args:
        choice: value of `cluster.optimizations`.
    """
    has_own_agents = is_on("ray_agents", choice)
    socket = server_socket() if is_on("fork_server", choice) else None
    starter = partial(_start_process, services.start_ray_process, has_own_agents, socket)
    of_services = {"start_ray_process": starter} if has_own_agents or socket is not None else {}
    if not is_on("ray_daemons", choice):
        return LeanStart(services=of_services)
    return LeanStart(
        node=dict.fromkeys(_UNUSED_DAEMONS, _start_nothing),
        services=of_services,
        # Ray would import the dashboard's packages only to find out whether it could start a dashboard.
        utils={"get_dashboard_dependency_error": _no_dashboard},
        system_config=_NO_IDLE_WORKERS,
    )


def _start_process(
    start: Callable[..., Any], has_own_agents: bool, socket: str | None, command: list[str], *args: Any, **kwargs: Any
) -> Any:
    """Call `services.start_ray_process` with other arguments for a raylet."""
    given = dict(argument.removeprefix("--").split("=", 1) for argument in command[1:] if "=" in argument)
    if "dashboard_agent_command" in given:
        wanted = _agent_commands(given) if has_own_agents else {}
        if socket is not None:
            setup = subprocess.list2cmdline([_SETUP_WORKER])
            start_worker = subprocess.list2cmdline(["-I", "-S", ray_worker.__file__, socket, _SETUP_WORKER])
            wanted["python_worker_command"] = given["python_worker_command"].replace(setup, start_worker, 1)
        command = [argument for argument in command if argument[2:].split("=")[0] not in wanted]
        command += [f"--{name}={value}" for name, value in wanted.items()]
    return start(command, *args, **kwargs)


def _agent_commands(given: Mapping[str, str]) -> dict[str, str]:
    """Return the arguments with which a raylet starts the agents of `ray_agents`, from its own arguments."""
    replacement = [sys.executable, "-I", "-S", ray_agents.__file__]
    place = [given["session_dir"], given["node_id"]]
    runtime_env = [*replacement, "runtime_env", *place, given["node_ip_address"]]
    return {
        "dashboard_agent_command": subprocess.list2cmdline([*replacement, "dashboard", *place]),
        "runtime_env_agent_command": f"{subprocess.list2cmdline(runtime_env)} {given['runtime_env_agent_command']}",
    }


def _no_dashboard() -> ImportError:
    """Report that the dashboard's packages are missing."""
    return ImportError("no dashboard is wanted")


def _start_nothing(node: Node, **_: Any) -> None:
    """Replace a method that starts a daemon."""
