"""Choose the Python interpreter for each kind of actor, and make it available on every node before an actor starts.

Invariant: unless the user configures otherwise, every actor runs on the driver's interpreter. If an environment cannot
be made on some node, the run ends before its first step with an error that names the node.
"""

import logging
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl.config import VenvConfig
from nemo_rl.utils.errors import VenvError
from nemo_rl.utils.venvs import PY_EXECUTABLES, create_local_venv, is_set, parse_py_executable, venv_folder
from nemo_rl.utils.venvs.build import Uv, update_lock, with_absolute_paths

logger = logging.getLogger(__name__)

USE_SYSTEM_EXECUTABLE = os.environ.get("NEMO_RL_PY_EXECUTABLES_SYSTEM", "0") == "1"
"""Interpreters are ignored if this is True: every actor runs on the driver's interpreter."""

ACTOR_ENVIRONMENT_REGISTRY: dict[str, str] = {
    "nemo_rl.models.policy.workers.rank.PolicyRank": PY_EXECUTABLES.SYSTEM,
    "nemo_rl.models.generation.worker.GenerationWorker": PY_EXECUTABLES.SYSTEM,
    "nemo_rl.environments.math_environment.MathEnvironment": PY_EXECUTABLES.SYSTEM,
    "nemo_rl.environments.math_environment.MathMultiRewardEnvironment": PY_EXECUTABLES.SYSTEM,
}
"""One of `PY_EXECUTABLES` or a similar text, by the dotted path of a class. Programs may add and change entries.
`cluster.venvs` takes precedence."""

_REPLY_S = 30.0
_rebuilt: set[str] = set()


def get_actor_python_env(actor_class_fqn: str) -> str:
    """Return the interpreter registered for a class. The default is the driver's interpreter."""
    if USE_SYSTEM_EXECUTABLE:
        return PY_EXECUTABLES.SYSTEM
    return ACTOR_ENVIRONMENT_REGISTRY.get(actor_class_fqn, PY_EXECUTABLES.SYSTEM)


def make_actor_runtime_env(
    actor_class_fqn: str, venv: VenvConfig | None = None, name: str = "", timeout_s: float = 1800.0
) -> dict[str, Any]:
    """Return Ray's `runtime_env` for actors of a class, after their environment has been made on every node.

    Args:
        actor_class_fqn: dotted path of the class.
        venv: the class's entry in `cluster.venvs`; if None, that of the registry.
        name: name of the environment; if empty, the dotted path.
        timeout_s: time limit in seconds for making the environment.

    Raises:
        ConfigError, VenvError, DeadlineExceededError: as in `create_local_venv_on_each_node`.
    """
    wanted = venv or parse_py_executable(get_actor_python_env(actor_class_fqn))
    if wanted is not None and USE_SYSTEM_EXECUTABLE:
        logger.info("cluster.venvs.%s has no effect: NEMO_RL_PY_EXECUTABLES_SYSTEM=1", name)
    if wanted is None or USE_SYSTEM_EXECUTABLE:
        return {}
    python = create_local_venv_on_each_node(wanted, name or actor_class_fqn, timeout_s=timeout_s)
    return {"py_executable": python if wanted.py_executable else shlex.quote(python)}


def create_local_venv_on_each_node(
    py_executable: str | VenvConfig, venv_name: str, *, timeout_s: float = 1800.0
) -> str:
    """Run `create_local_venv` on all living nodes at the same time.

    Returns:
        Path of the interpreter, which is the same on all nodes.

    Raises:
        ConfigError: there is no such extra, or the text cannot be parsed.
        VenvError: the environment could not be made on some nodes (each is named), or the nodes' paths differ.
    """
    wanted = parse_py_executable(py_executable) if isinstance(py_executable, str) else py_executable
    if wanted is None:
        return sys.executable
    folder = venv_folder()
    force = is_set("NRL_FORCE_REBUILD_VENVS") and venv_name not in _rebuilt
    _rebuilt.add(venv_name)
    here, end = ray.get_runtime_context().get_node_id(), time.monotonic() + timeout_s
    if wanted.extras is not None:  # once, because nodes may share the checkout
        update_lock(Uv(end, f"Making the environment {venv_name!r}"))
    # Forward only this uv variable: everyone can read a runtime environment, and other uv variables hold passwords.
    shared = {key: os.environ[key] for key in ("UV_OFFLINE",) if key in os.environ}
    make = ray.remote(num_cpus=0, max_retries=0, runtime_env={"env_vars": shared})(_made_here)
    arguments = (with_absolute_paths(wanted), venv_name, force, str(folder), timeout_s)
    asked: list[tuple[str, Any]] = []
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] != here:
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked.append((node["NodeManagerAddress"], make.options(scheduling_strategy=where).remote(*arguments)))
    answers = [(ray.util.get_node_ip_address(), *_made_here(*arguments))]
    answers += [(address, *_answer(ref, end + _REPLY_S - time.monotonic())) for address, ref in asked]
    return _agreed(venv_name, answers)


def _made_here(wanted: VenvConfig, name: str, force: bool, folder: str, timeout_s: float) -> tuple[str, str]:
    """Return the path of the interpreter and "", or "" and the reason why it does not exist."""
    try:
        return create_local_venv(wanted, name, force, folder=Path(folder), timeout_s=timeout_s), ""
    except (VenvError, TimeoutError, OSError) as error:
        return "", str(error)


def _answer(ref: Any, timeout_s: float) -> tuple[str, str]:
    try:
        return ray.get(ref, timeout=max(timeout_s, 0.0))
    except GetTimeoutError:
        return "", "no answer in time (cluster.timeouts.venv_s)"
    except RayError as error:
        return "", str(error).strip().splitlines()[-1]


def _agreed(name: str, answers: list[tuple[str, str, str]]) -> str:
    """Return the nodes' common interpreter path, from answers with a node's address, path and error."""
    failed = [f"node {address}: {reason}" for address, _, reason in answers if reason]
    if failed:
        raise VenvError(
            f"The environment {name!r} is missing on {len(failed)} of {len(answers)} nodes:\n" + "\n".join(failed)
        )
    if len({python for _, python, _ in answers}) > 1:
        described = "; ".join(f"{address}: {python}" for address, python, _ in answers)
        raise VenvError(
            f"The nodes made the environment {name!r} from different inputs, so paths differ: {described}. The file "
            "venv.json in each folder lists the inputs; give all nodes the same uv, Python and source."
        )
    return answers[0][1]
