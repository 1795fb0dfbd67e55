"""Start Ray on this machine for one run, with no more processes than a run uses.

For runs that have no cluster to join. What is left out serves people who look at a cluster from outside or machines
that come and go; actors, tasks and objects work as ever.

    gcs_server, raylet                               started by Ray, needed
    two agents of the raylet                         replaced by `ray_agents`: 130 MB, two seconds of each start
    autoscaler monitor, log monitor, dashboard       left out: 300 MB and seconds of a laptop's start
    an idle worker for each core                     left out: a run knows which workers it wants

Ray does not survive the death of its gcs_server or raylet, but says so after a minute, or as the death of some
worker, or ends the driver from C++ without a word. So a thread for each of them sleeps until it ends and logs that at
once, and every long wait of the controller calls `check_local_ray` once a second to end the run in order.
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
"""How long a wait may go on without `check_local_ray`."""

LOOPBACK = "127.0.0.1"
_CPU_OBJECT_STORE_BYTES = 1 << 30
_UNUSED_DAEMONS = ("start_monitor", "start_log_monitor", "start_api_server")
_SYSTEM_CONFIG = {
    "prestart_worker_first_driver": False,
    "enable_worker_prestart": False,
    # Nobody starts it again; after SIGTERM it may live on without an answer, so that no wait would end before.
    "gcs_rpc_server_reconnect_timeout_s": 20,
}
_SETUP_WORKER = str(Path(ray.__file__).parent / "_private" / "workers" / "setup_worker.py")
_START_ATTEMPTS = 3
_START_S = 300.0
"""For all attempts; Ray's own deadlines end each of them within a minute."""
_ROLES = {"gcs_server": "control service", "raylet": "node manager"}

_noting = threading.Lock()
_death: RayDiedError | None = None
_is_exiting = False


def start_local_ray(
    *, num_cpus: int | None, env_vars: Mapping[str, str], include_dashboard: bool, log_to_driver: bool
) -> Any:
    """Start Ray under 127.0.0.1; it ends with this process.

    Args:
        num_cpus: logical CPUs; None counts the machine's.
        env_vars: environment of all workers, on top of this process's own.
        include_dashboard: start the dashboard, and the daemons around it.
        log_to_driver: repeat what workers write on this process's console.

    Returns:
        What `ray.init` returns.

    Raises:
        ResourceInsufficientError: Ray did not start.
        DeadlineExceededError: it did not end its attempts in time.
    """
    require_startable_ray()
    # Without this Ray replaces 127.0.0.1 by an address that the network can reach, and all of its processes
    # listen there. The variable tells its other processes the same.
    ray_constants.ENABLE_RAY_CLUSTER = False
    is_lean = not (include_dashboard or log_to_driver)
    # Ray would import what its dashboard needs, to see whether it could start one.
    unasked = {"get_dashboard_dependency_error": _no_dashboard} if is_lean else {}
    unused = _UNUSED_DAEMONS if is_lean else ()
    starter = {"start_ray_process": partial(_start_lean, services.start_ray_process)} if is_lean else {}
    # Workers inherit the environment that Ray starts in.
    with (
        _environment(
            {**env_vars, **_token_without_home(), **_whole_paths(), ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}
        ),
        _replaced(Node, dict.fromkeys(unused, _start_nothing)),
        _replaced(services, {"ConsolePopen": _OwnSession, **starter}),
        # Ray's handler would drain the node for seconds while it starts.
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
    """A secret that this Ray's processes show each other, where Ray could not keep one in `~/.ray`.

    Ray makes the file on the first start of a user, and fails where the home is read-only.
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
    """RAY_TMPDIR as an absolute path: Ray's daemons have other current folders, and would wait for each other."""
    given = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR"))
    return {} if given is None or os.path.isabs(given) else {"RAY_TMPDIR": str(ray_folder().parent)}


class _OwnSession(services.ConsolePopen):
    """A daemon of Ray's that no signal to the run's terminal or process group reaches.

    Ctrl-C, a closed terminal and `kill -- -<group>` then reach the driver alone, which ends the rest in order.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, start_new_session=True, **kwargs)


def check_local_ray() -> None:
    """See that the Ray which this process started is whole, or of a joined one what it needs (`joined_ray`).

    Raises:
        RayDiedError: its gcs_server or raylet has ended. What is left of what this process started is ended too, and
            with it all workers, so that no other wait lasts and nothing is left behind.
    """
    if _death is None:
        return
    with _noting:
        node = ray._private.worker._global_node
        if node is not None:
            node.kill_all_processes(check_alive=False, allow_graceful=False)
    raise _death


def _watch(node: Node) -> None:
    """Start a thread for each daemon that the run cannot do without."""
    expect_deaths()
    for name in _ROLES:
        process = node.all_processes[name][0].process
        threading.Thread(target=_await_end, args=(node, name, process), name=f"{name}-watch", daemon=True).start()


def expect_deaths() -> None:
    """From here on `note_death` counts, until this process ends."""
    global _death
    _death = None
    # Registered after Ray's own, so called before it ends the daemons.
    atexit.register(_expect_ends)


def note_death(node: Node, what: str, obituary: str) -> None:
    """Let every wait end with an error, and say so at once; nothing where this process has left that Ray."""
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
    """Whether `check_local_ray` has found it dead; calls that ask its gcs_server would block until Ray gives up."""
    return _death is not None


def _obituary(what: str, status: int, log_path: str) -> str:
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return (
        f"{what} {how}; without it the run cannot go on, and all of its workers were ended. If nobody killed it, look "
        f"for the kernel's out-of-memory killer in the machine's log and at the end of {log_path}. Start the run "
        "again; with checkpointing.enabled=true it goes on from its last checkpoint."
    )


def connected_within(start: Callable[[], Any], timeout_s: float, what: str, advice: str) -> Any:
    """Call what connects this process to Ray, on a thread that lasts as long as this process.

    The calling thread waits in Python, so that signals are handled at once, which Ray's C++ code would not let happen.
    The thread has to last because the kernel ends Ray's daemons with their parent (PR_SET_PDEATHSIG), and means by it
    the thread that started them.

    Args:
        start: calls `ray.init`.
        timeout_s: how long it may take.
        what: the start of the error's message.
        advice: its end.

    Raises:
        DeadlineExceededError: it takes longer.
        Exception: what `start` raised.
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
    """False for Ray's warning that it sets no handler of SIGTERM outside the main thread, which is what we want."""
    return "SIGTERM handler is not set" not in record.getMessage()


def _init_patiently(**arguments: Any) -> Any:
    """`ray.init`, again when it fails: on a crowded machine Ray's own deadlines for its parts (15 s) are too short."""
    for attempt in range(1, _START_ATTEMPTS + 1):
        try:
            return ray.init(**arguments)
        except Exception as failure:  # boundary: Ray raises a plain Exception
            _end_half_started(failure)
            reason = failure
        if isinstance(reason, OSError) and not isinstance(reason, ConnectionError | TimeoutError):
            break  # a full or read-only disk is the same the next time
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
    """End what a failed `ray.init` started; only its traceback holds the processes."""
    for frame, _ in traceback.walk_tb(failure.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, Node):
            node.kill_all_processes(check_alive=False, allow_graceful=False)
            return


@contextmanager
def _replaced(owner: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Change a part of Ray while it starts; there is no public switch for these."""
    originals = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


def _keep_handler(handler: Any) -> None:
    """In place of the function that makes Ray handle SIGTERM: the program has a handler."""


def _start_lean(start: Callable[..., Any], command: list[str], *args: Any, **kwargs: Any) -> Any:
    """`services.start_ray_process`, where a raylet gets the agents of `ray_agents`."""
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
    """In place of a function that says what the dashboard lacks."""
    return ImportError("no dashboard is wanted")


def _start_nothing(node: Node, **_: Any) -> None:
    """In place of a method that starts a daemon."""


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
    """Size of a local Ray's object store: 1 GiB, or 30 % of a small machine's memory; None (Ray's own rule) where there
    are GPUs.
    """
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return None
    return min(_CPU_OBJECT_STORE_BYTES, int(0.3 * machine_bytes()))
