"""Start Ray on this machine for one run, with only the processes that a run uses.

This is for runs that have no cluster to join. The processes left out serve users who inspect a cluster from outside or
clusters whose machines change; actors, tasks and objects work as usual.

    gcs_server, raylet                               started by Ray, needed
    two agents of the raylet                         replaced by `ray_agents`: 130 MB, two seconds of each start
    autoscaler monitor, log monitor, dashboard       left out: 300 MB and seconds of a laptop's start
        an idle worker for each core                     left out: a run starts the workers it needs

Ray does not survive the end of its gcs_server or raylet. By itself it reports this after a minute, or as the death of
some worker, or it ends the driver from C++ silently. So one thread for each of the two waits for its end and logs it
immediately, and every long wait of the controller calls `check_local_ray` once a second to end the run in order.
"""

import atexit
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services
from ray._private import utils as ray_utils
from ray._private.node import Node

from nemo_rl.distributed import ray_agents, ray_worker
from nemo_rl.distributed.cluster.start_checks import ray_folder, require_startable_ray
from nemo_rl.distributed.fork_server import server_socket
from nemo_rl.host.memory import machine_bytes
from nemo_rl.host.stop_signals import result_with_handlers
from nemo_rl.utils.errors import DeadlineExceededError, RayDiedError, ResourceInsufficientError

logger = logging.getLogger(__name__)

LIVENESS_PERIOD_S = 1.0
"""Seconds a wait may last without calling `check_local_ray`."""

LOOPBACK = "127.0.0.1"
_CPU_OBJECT_STORE_BYTES = 1 << 30
_UNUSED_DAEMONS = ("start_monitor", "start_log_monitor", "start_api_server")
_SYSTEM_CONFIG = {
    "prestart_worker_first_driver": False,
    "enable_worker_prestart": False,
    # The gcs_server is not restarted. After SIGTERM it can hang, and waits would not end; so time out after 20 s.
    "gcs_rpc_server_reconnect_timeout_s": 20,
}
_SETUP_WORKER = str(Path(ray.__file__).parent / "_private" / "workers" / "setup_worker.py")
_START_ATTEMPTS = 3
_START_S = 300.0
"""Seconds for all attempts together; Ray's own deadlines end each attempt within a minute."""
_ROLES = {"gcs_server": "control service", "raylet": "node manager"}

_noting = threading.Lock()
_death: RayDiedError | None = None
_is_exiting = False


def start_local_ray(
    *, num_cpus: int | None, env_vars: Mapping[str, str], include_dashboard: bool, log_to_driver: bool
) -> Any:
    """Start Ray under 127.0.0.1; it ends with this process.

    Args:
        num_cpus: logical CPUs; None takes the machine's count.
        env_vars: environment of all workers, on top of this process's own.
        include_dashboard: start the dashboard and the daemons that it needs.
        log_to_driver: repeat the workers' output on this process's console.

    Returns:
        The result of `ray.init`.

    Raises:
        ResourceInsufficientError: Ray did not start.
        DeadlineExceededError: the attempts did not finish in time.
    """
    require_startable_ray()
    # Otherwise Ray replaces 127.0.0.1 by an address that the network can reach, and all of its processes listen
    # there. The environment variable tells Ray's other processes the same.
    ray_constants.ENABLE_RAY_CLUSTER = False
    is_lean = not (include_dashboard or log_to_driver)
    # Ray would import the dashboard's dependencies only to check whether it could start one.
    unasked = {"get_dashboard_dependency_error": _no_dashboard} if is_lean else {}
    unused = _UNUSED_DAEMONS if is_lean else ()
    starter = {"start_ray_process": partial(_start_lean, services.start_ray_process)} if is_lean else {}
    # Workers inherit the environment in which Ray starts.
    with (
        _environment(
            {**env_vars, **_token_without_home(), **_whole_paths(), ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}
        ),
        _replaced(Node, dict.fromkeys(unused, _start_nothing)),
        _replaced(services, {"ConsolePopen": _OwnSession, **starter}),
        # While Ray starts, its handler would take seconds to drain the node.
        _replaced(ray_utils, {"set_sigterm_handler": _keep_handler, **unasked}),
    ):
        start = partial(
            _init_patiently,
            address="local",
            num_cpus=num_cpus,
            include_dashboard=include_dashboard,
            object_store_memory=object_store_bytes(),
            log_to_driver=log_to_driver,
            logging_level=logging.WARNING,
            _node_ip_address=LOOPBACK,
            _system_config=_SYSTEM_CONFIG,
        )
        context = connected_within(start, _START_S, "Ray did not start on this machine", _start_advice())
    node: Any = ray._private.worker._global_node
    _watch(node)
    return context


def _token_without_home() -> dict[str, str]:
    """Make an authentication token for this Ray's processes if Ray cannot store one in `~/.ray`.

    Ray writes the token file when a user first starts it, and fails if the home folder is read-only.
    """
    home = Path(os.path.expanduser("~")) / ".ray"
    given = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if any(os.environ.get(name) for name in given) or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return {}
    if (home / "auth_token").is_file():
        return {}
    existing = home if home.exists() else home.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            return {}
    except OSError:
        return {"RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _whole_paths() -> dict[str, str]:
    """Make RAY_TMPDIR absolute: Ray's daemons have other working folders, and would wait for files in the wrong one."""
    given = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR"))
    return {} if given is None or os.path.isabs(given) else {"RAY_TMPDIR": str(ray_folder().parent)}


class _OwnSession(services.ConsolePopen):
    """A daemon of Ray that does not receive signals to the run's terminal or process group.

    Ctrl-C, a closed terminal and `kill -- -<group>` then reach the driver alone, which ends the daemons in order.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, start_new_session=True, **kwargs)


def check_local_ray() -> None:
    """Check that the Ray this process started is complete, or that the joined cluster still answers (`joined_ray`).

    Raises:
        RayDiedError: its gcs_server or raylet has ended. The remaining Ray processes that this process started, and all
            workers, are ended too, so that no other wait lasts and no process is left.
    """
    if _death is None:
        return
    with _noting:
        node = ray._private.worker._global_node
        if node is not None:
            node.kill_all_processes(check_alive=False, allow_graceful=False)
    raise _death


def _watch(node: Node) -> None:
    """Start a thread for each daemon that the run needs."""
    expect_deaths()
    for name in _ROLES:
        process = node.all_processes[name][0].process
        threading.Thread(target=_await_end, args=(node, name, process), name=f"{name}-watch", daemon=True).start()


def expect_deaths() -> None:
    """Let `note_death` take effect from here until this process ends."""
    global _death
    _death = None
    # Registered after Ray's own handler, so it runs before Ray ends the daemons.
    atexit.register(_expect_ends)


def note_death(node: Node, what: str, obituary: str) -> None:
    """Log the end of a daemon and let every wait raise; do nothing if this process has disconnected from that Ray."""
    global _death
    with _noting:
        # `ray.shutdown` disconnects the worker from its node before it ends the daemons.
        if _death is None and not _is_exiting and ray._private.worker.global_worker.node is node:
            _death = RayDiedError(obituary)
            logger.error("%s has ended; the run ends too.", what)


def _await_end(node: Node, name: str, process: subprocess.Popen[bytes]) -> None:
    process.wait()
    what = f"The {_ROLES[name]} of this run's Ray ({name}, pid {process.pid})"
    note_death(node, what, _obituary(what, process.returncode, f"{node.get_logs_dir_path()}/{name}.out"))


def _expect_ends() -> None:
    global _is_exiting
    _is_exiting = True


def local_ray_has_died() -> bool:
    """Return whether Ray is known to have died; calls to its gcs_server would then block until Ray gives up."""
    return _death is not None


def _obituary(what: str, status: int, log_path: str) -> str:
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return (
        f"{what} {how}; the run cannot continue without it, and all of its workers were ended. If no user killed it, "
        f"look for the kernel's out-of-memory killer in the machine's log and at the end of {log_path}. Start the run "
        "again; with checkpointing.enabled=true it continues from its last checkpoint."
    )


def connected_within(start: Callable[[], Any], timeout_s: float, what: str, advice: str) -> Any:
    """Call a function that connects this process to Ray, on a thread that lasts as long as this process.

    The calling thread waits in Python, where signals are handled immediately; Ray's C++ code would delay them. The
    thread must last because the kernel ends Ray's daemons together with the thread that started them
    (PR_SET_PDEATHSIG).

    Args:
        start: calls `ray.init`.
        timeout_s: seconds that it may take.
        what: start of the error message.
        advice: end of the error message.

    Raises:
        DeadlineExceededError: `start` takes longer.
        Exception: an error that `start` raised.
    """
    started: Future[Any] = Future()

    def run() -> None:
        try:
            started.set_result(start())
        except BaseException as error:
            started.set_exception(error)
        else:
            threading.Event().wait()

    log = logging.getLogger("ray._private.worker")
    log.addFilter(_says_something_new)
    threading.Thread(target=run, name="ray-start", daemon=True).start()
    try:
        return result_with_handlers(started, timeout_s)
    except TimeoutError:
        if started.done():
            raise
        raise DeadlineExceededError(f"{what} within {timeout_s:g} s. {advice}") from None
    finally:
        log.removeFilter(_says_something_new)


def _says_something_new(record: logging.LogRecord) -> bool:
    """Return False for Ray's warning that it sets no SIGTERM handler outside the main thread; none is wanted."""
    return "SIGTERM handler is not set" not in record.getMessage()


def _init_patiently(**arguments: Any) -> Any:
    """Call `ray.init`, and again if it fails: Ray's deadlines for its parts (15 s) are too short on a busy machine."""
    for attempt in range(1, _START_ATTEMPTS + 1):
        try:
            return ray.init(**arguments)
        except Exception as failure:  # boundary: Ray raises a plain Exception
            _end_half_started(failure)
            reason = failure
        if isinstance(reason, OSError) and not isinstance(reason, ConnectionError | TimeoutError):
            break  # a full or read-only disk will not change
        logger.warning("Ray did not start (attempt %d of %d): %s", attempt, _START_ATTEMPTS, reason)
    attempts = f"{attempt} attempt{'s' if attempt > 1 else ''}"
    raise ResourceInsufficientError(
        f"Ray did not start on this machine in {attempts}: {reason} {_start_advice()}"
    ) from reason


def _start_advice() -> str:
    return (
        f"Its logs are below {ray_folder()}. A machine with too little free memory or too many busy processes is a "
        "usual reason."
    )


def _end_half_started(failure: Exception) -> None:
    """End the processes that a failed `ray.init` started; only the error's traceback still refers to them."""
    for frame, _ in traceback.walk_tb(failure.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, Node):
            node.kill_all_processes(check_alive=False, allow_graceful=False)
            return


@contextmanager
def _replaced(owner: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Replace parts of Ray while it starts; there is no public switch for these."""
    originals = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


def _keep_handler(handler: Any) -> None:
    """Do nothing instead of letting Ray handle SIGTERM: the program has its own handler."""


def _start_lean(start: Callable[..., Any], command: list[str], *args: Any, **kwargs: Any) -> Any:
    """Call `services.start_ray_process`, and give a raylet the agents of `ray_agents`."""
    given = dict(argument.removeprefix("--").split("=", 1) for argument in command[1:] if "=" in argument)
    if "dashboard_agent_command" in given:
        stand_in = [sys.executable, "-I", "-S", ray_agents.__file__]
        place = [given["session_dir"], given["node_id"]]
        runtime_env = [*stand_in, "runtime_env", *place, given["node_ip_address"]]
        wanted = {
            "dashboard_agent_command": subprocess.list2cmdline([*stand_in, "dashboard", *place]),
            "runtime_env_agent_command": f"{subprocess.list2cmdline(runtime_env)} {given['runtime_env_agent_command']}",
        }
        if (path := server_socket()) is not None:
            setup = subprocess.list2cmdline([_SETUP_WORKER])
            start_worker = subprocess.list2cmdline(["-I", "-S", ray_worker.__file__, path, _SETUP_WORKER])
            wanted["python_worker_command"] = given["python_worker_command"].replace(setup, start_worker, 1)
        command = [argument for argument in command if argument[2:].split("=")[0] not in wanted]
        command += [f"--{name}={agent}" for name, agent in wanted.items()]
    return start(command, *args, **kwargs)


def _no_dashboard() -> ImportError:
    """Replace the function that checks the dashboard's dependencies."""
    return ImportError("no dashboard is wanted")


def _start_nothing(node: Node, **_: Any) -> None:
    """Replace a method that starts a daemon."""


@contextmanager
def _environment(env_vars: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in env_vars}
    os.environ.update(env_vars)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def object_store_bytes() -> int | None:
    """Return the size of a local Ray's object store in bytes.

    1 GiB, or 30 % of a small machine's memory; None (Ray's own rule) on machines with GPUs.
    """
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return None
    return min(_CPU_OBJECT_STORE_BYTES, int(0.3 * machine_bytes()))
