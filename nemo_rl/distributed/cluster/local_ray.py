"""Start Ray on this machine for a single run, without the parts that `optimizations.lean_ray` leaves out.

Ray does not survive the death of its gcs_server or raylet. It reports such a death only after a minute, reports the
death of a worker instead, or ends the driver silently from C++. Therefore a thread waits for the end of each daemon and
logs it immediately. Every long wait of the controller calls `check_local_ray` once a second to end the run in order.
"""

import atexit
import logging
import os
import secrets
import select
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

from nemo_rl.distributed.cluster.start_checks import own_ray_folder, ray_folder, require_startable_ray
from nemo_rl.host.boundary import Boundary
from nemo_rl.host.capacity import machine_bytes
from nemo_rl.host.processes import is_stopped
from nemo_rl.host.stop_signals import result_with_handlers
from nemo_rl.optimizations.lean_ray import LeanStart, lean_start
from nemo_rl.optimizations.switch import Choice
from nemo_rl.utils.errors import DeadlineExceededError, RayDiedError, ResourceInsufficientError

logger = logging.getLogger(__name__)

LIVENESS_PERIOD_S = 1.0
"""Seconds between two calls of `check_local_ray` in a long wait."""

LOOPBACK = "127.0.0.1"
_CPU_OBJECT_STORE_BYTES = 1 << 30
_SYSTEM_CONFIG = {
    # # No process restarts the gcs_server. After SIGTERM it can hang without answering, so that waits would not end.
    "gcs_rpc_server_reconnect_timeout_s": 20,
}
_START_ATTEMPTS = 3
_START_S = 300.0
"""Time limit in seconds for all attempts to start Ray. Ray's own deadlines end each attempt within a minute."""
_LOOK_PERIOD_S = 5
"""Seconds between two checks of whether a signal has stopped a daemon."""
_STOPPED_LOOKS = 4
_ROLES = {"gcs_server": "control service", "raylet": "node manager"}

_noting = threading.Lock()
_death: RayDiedError | None = None
_is_exiting = False


def start_local_ray(
    *,
    num_cpus: int | None,
    env_vars: Mapping[str, str],
    include_dashboard: bool,
    log_to_driver: bool,
    optimizations: Choice,
) -> Any:
    """Start Ray on 127.0.0.1. It ends with this process.

    Args:
        num_cpus: logical CPUs; if None, the CPUs of the machine.
        env_vars: environment of all workers, in addition to that of this process.
        include_dashboard: start the dashboard with its daemons.
        log_to_driver: show the workers' output on this process's console.
        optimizations: value of `cluster.optimizations`; it has no effect with a dashboard or `log_to_driver`.

    Returns:
        The result of `ray.init`.

    Raises:
        ResourceInsufficientError: Ray did not start.
        DeadlineExceededError: the attempts took too long.
    """
    require_startable_ray()
    # # Without this, Ray replaces 127.0.0.1 with an address that the network can reach, on which all of its processes
    # listen. The variable has the same effect in Ray's other processes.
    ray_constants.ENABLE_RAY_CLUSTER = False
    lean = LeanStart() if include_dashboard or log_to_driver else lean_start(optimizations)
    # Workers inherit the environment that Ray starts in.
    with (
        _environment(
            {**env_vars, **_token_without_home(), **_own_folder(), ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}
        ),
        _replaced(Node, lean.node),
        _replaced(services, {"ConsolePopen": _OwnSession, **lean.services}),
        # # Ray's handler would drain the node for seconds during a start.
        _replaced(ray_utils, {"set_sigterm_handler": _keep_handler, **lean.utils}),
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
            _system_config={**_SYSTEM_CONFIG, **lean.system_config},
        )
        context = connected_within(start, _START_S, "Ray did not start on this machine", _start_advice())
    node: Any = ray._private.worker._global_node
    _watch(node)
    return context


def _token_without_home() -> dict[str, str]:
    """Return a token for Ray's processes as an environment variable, if Ray cannot write a token to `~/.ray`.

    Ray writes the file on a user's first start, and fails where the home folder is read-only.
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


def _own_folder() -> dict[str, str]:
    """Return RAY_TMPDIR, a private folder, as an absolute path, so that it is valid in every working directory."""
    return {"RAY_TMPDIR": str(own_ray_folder().parent)}


class _OwnSession(services.ConsolePopen):
    """A daemon of Ray in its own session, which signals to the run's terminal or process group do not reach.

    Ctrl-C, a closed terminal and `kill -- -<group>` then reach only the driver, which ends the daemons in order.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, start_new_session=True, **kwargs)


def check_local_ray() -> None:
    """Check that this process's Ray daemons are alive. In a joined cluster, check those that `joined_ray` watches.

    Raises:
        RayDiedError: gcs_server or raylet has ended. The other daemons of this process and all workers are ended too,
            so that no wait and no process continues.
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
    """Let `note_death` act from now on, until this process ends."""
    global _death
    _death = None
    # # This handler is registered after Ray's own, so Python calls it before Ray's handler ends the daemons.
    atexit.register(_expect_ends)


def note_death(node: Node, obituary: str) -> None:
    """Log the death of a daemon and make every wait end with an error, unless this process has left this Ray."""
    global _death
    with _noting:
        # `ray.shutdown` disconnects the worker from its node before it ends the daemons.
        if _death is None and not _is_exiting and ray._private.worker.global_worker.node is node:
            _death = RayDiedError(obituary)
            logger.error("%s", obituary)


def _await_end(node: Node, name: str, process: subprocess.Popen[bytes]) -> None:
    what = f"The {_ROLES[name]} of this run's Ray ({name}, pid {process.pid})"
    log_path = f"{node.get_logs_dir_path()}/{name}.out"
    if _await_stop(process):
        # This comes before the kill: Ray's C++ code, if it waits for the daemon, ends this process without a message.
        note_death(node, _death_message(what, None, log_path))
        process.kill()
    note_death(node, _death_message(what, process.wait(), log_path))


def _await_stop(process: subprocess.Popen[bytes]) -> bool:
    """Wait until a process has ended (False), or was found stopped in `_STOPPED_LOOKS` consecutive checks (True)."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, ProcessLookupError):
        return False  # not Linux, or the process has ended
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        num_stopped = 0
        while num_stopped < _STOPPED_LOOKS:
            if ended.poll(1000 * _LOOK_PERIOD_S):
                return False
            num_stopped = num_stopped + 1 if is_stopped(process.pid) else 0
    finally:
        os.close(descriptor)
    return True


def _expect_ends() -> None:
    global _is_exiting
    _is_exiting = True


def local_ray_has_died() -> bool:
    """Return whether Ray is known to be dead. Calls to its gcs_server would then block for a long time."""
    return _death is not None


def _death_message(what: str, status: int | None, log_path: str) -> str:
    if status is None:
        return (
            f"{what} was stopped (SIGSTOP) for {_LOOK_PERIOD_S * _STOPPED_LOOKS} s and was ended; the run cannot "
            "continue without it, and all of its workers were ended. Start the run again; with "
            "checkpointing.enabled=true it continues from its last checkpoint."
        )
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return (
        f"{what} {how}; the run cannot continue without it, and all of its workers were ended. If no user killed it, "
        f"look for the kernel's out-of-memory killer in the machine's log and at the end of {log_path}. Start the run "
        "again; with checkpointing.enabled=true it continues from its last checkpoint."
    )


def connected_within(start: Callable[[], Any], timeout_s: float, what: str, advice: str) -> Any:
    """Connect this process to Ray in a thread that lives as long as the process.

    The calling thread waits in Python, so that signals are handled immediately. Ray's C++ code would delay them. The
    thread must live on because the kernel ends Ray's daemons together with the thread that started them
    (PR_SET_PDEATHSIG).

    Args:
        start: function that calls `ray.init`.
        timeout_s: time limit in seconds.
        what: start of the error message.
        advice: end of the error message.

    Raises:
        DeadlineExceededError: `start` takes longer.
        Exception: an error that `start` raised.
    """
    started: Future[Any] = Future()

    def run() -> None:
        with Boundary(BaseException) as caught:  # the caller raises it
            started.set_result(start())
        if caught:
            started.set_exception(caught.take())
        else:
            threading.Event().wait()

    _free_ended_groups()
    log = logging.getLogger("ray._private.worker")
    log.addFilter(_is_unexpected)
    threading.Thread(target=run, name="ray-start", daemon=True).start()
    try:
        return result_with_handlers(started, timeout_s)
    except TimeoutError:
        if started.done():
            raise
        raise DeadlineExceededError(f"{what} within {timeout_s:g} s. {advice}") from None
    finally:
        log.removeFilter(_is_unexpected)


def _free_ended_groups() -> None:
    """Clear this thread's cache of DTensor, which may hold the last reference to a process group that has ended."""
    # A process that another thread forks frees this cache, and would wait for threads of the group, which it lacks.
    if (torch := sys.modules.get("torch")) is not None:
        torch._C._clear_DTensor_sharding_propagator_cache()


def _is_unexpected(record: logging.LogRecord) -> bool:
    """Return False for Ray's warning about a missing SIGTERM handler outside the main thread, which is intended."""
    return "SIGTERM handler is not set" not in record.getMessage()


def _init_patiently(**arguments: Any) -> Any:
    """Call `ray.init`, and again if it fails, because Ray's deadlines (15 s) are too short for a busy machine."""
    for attempt in range(1, _START_ATTEMPTS + 1):
        with Boundary(Exception) as caught:  # Ray raises a plain Exception
            return ray.init(**arguments)
        reason = caught.take()
        _end_half_started(reason)
        if isinstance(reason, OSError) and not isinstance(reason, ConnectionError | TimeoutError):
            break  # another attempt does not help with a full or read-only disk
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
    """End the processes that a failed `ray.init` started. Only its traceback refers to them."""
    for frame, _ in traceback.walk_tb(failure.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, Node):
            node.kill_all_processes(check_alive=False, allow_graceful=False)
            return


@contextmanager
def _replaced(owner: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Replace attributes of a part of Ray during its start, because Ray has no public switch for them."""
    originals = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


def _keep_handler(handler: Any) -> None:
    """Do nothing, instead of setting Ray's SIGTERM handler, because the program has its own handler."""


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
    """Return the size of a local Ray's object store: 1 GiB, 30 % of a small machine's memory, or None (Ray's rule) with
    GPUs.
    """
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return None
    return min(_CPU_OBJECT_STORE_BYTES, int(0.3 * machine_bytes()))
