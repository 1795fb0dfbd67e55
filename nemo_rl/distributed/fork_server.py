"""Workers as forks of one process that has imported what all of them import, in place of processes that import it anew.

Importing torch, transformers and Ray takes four processor seconds and 400 MB in each process. The program of a run on
the CPU imports them and then forks this server, before it has threads or has read anything but its configuration:

    driver (launch)  import torch ... ──► fork ──► init_ray ──► ... the run
                                           │          │ start a worker
    fork server                            └─ serve ◄─┤ `ray_worker.py`, in place of Ray's own script, sends what it
    worker (child of the server)               └─ fork, then Ray's worker program        was started with, and ends

Pages that nobody writes to are held once. A worker with a Python, a package or a variable of its own that is read
before or while something is imported (`needs_own_start`) is started by Ray as ever; so is every worker where there is
no server: on GPUs (CUDA does not survive a fork), in a joined cluster, in notebooks, in a program with threads.

Invariant: a worker cannot tell how it was started, but for the time it took: its environment, folder, arguments,
outputs, process group and signals are those that the raylet gave it, its threads those of its own environment.
"""

import atexit
import gc
import importlib
import logging
import multiprocessing.util
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from nemo_rl.distributed.ray_worker import WorkerStart, receive_start
from nemo_rl.host.cores import usable_cores
from nemo_rl.host.stop_signals import STOP_SIGNALS
from nemo_rl.utils.cluster_address import cluster_address
from nemo_rl.utils.imports import importing

logger = logging.getLogger(__name__)

PRELOADED = (
    "torch",
    "jsonschema",
    "torch._dynamo",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
"""Not Ray itself, which reads once, when it is imported, which worker of which raylet it is."""
READ_WHEN_LOADED = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "20000"}
"""What OpenMP is loaded with: Ray's default for workers, and what ranks of a policy want. PyTorch's own number of
threads is set in each process, see `adopt`."""
_READ_EARLY = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "LD_", "PYTHON", "XDG_"),
    *("HF_", "TRANSFORMERS_", "TORCH", "PYTORCH_"),
)
_READ_LATE = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "TORCHDYNAMO_DISABLE")
"""Of these, what `adopt` sets, what ranks are given by the run, and what is read whenever it is needed."""

_LAST_WORDS_S = 2.0
"""How long workers may take to see that the driver has ended."""

_socket: str | None = None


def start_fork_server(libraries: Callable[[], Sequence[str]] = tuple) -> None:
    """Import `PRELOADED` here and fork the server; does nothing where that is not safe.

    Once in a process, from its main thread. The server ends with this process.

    Args:
        libraries: names, once `PRELOADED` is imported, modules that only some workers import, and this process never;
            the server does so while it is idle. They start no thread, and read no variable that workers have.
    """
    global _socket
    if _socket is not None or sys.platform != "linux" or cluster_address():
        return
    if {"torch", "ray"} & sys.modules.keys():
        logger.debug("This process has imported too much: workers are started anew.")
        return
    _preload()
    more = libraries()
    if _num_threads() == 1:
        try:
            _socket = _fork_server(more)
        except OSError as error:  # no room in the folder for temporary files, or its name is too long for a socket
            logger.debug("Workers are started anew: %s.", error)
    else:
        logger.debug("This process has threads: workers are started anew.")
    sys.modules["torch"].set_num_threads(_wanted_threads(os.environ) or usable_cores())


def server_socket() -> str | None:
    """Where the server of this process listens; None without one."""
    return _socket


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _wanted_threads(environment: Mapping[str, str]) -> int:
    """What OpenMP reads for the outermost level; 0 if nothing that it would take."""
    first = environment.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(first) if first.isdigit() else 0


def _preload() -> None:
    """Import with OpenMP's variables as workers want them."""
    before = {name: os.environ.get(name) for name in READ_WHEN_LOADED}
    os.environ.update(READ_WHEN_LOADED)
    try:
        with importing():
            for module in PRELOADED:
                importlib.import_module(module)
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def _fork_server(libraries: Sequence[str]) -> str:
    """Fork it; the path of its socket."""
    ours, servers = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the program may have replaced or closed it
            stream.flush()
    # What is alive now stays, here and in the forks; a collection that looked at it would write to its pages.
    gc.collect()
    gc.freeze()
    # The program may leave on these signals, and only the server would remove the folder. There they stay blocked,
    # since it ends with the driver, for which they are meant.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        folder = Path(tempfile.mkdtemp(prefix="nrl-fork-"))
        _fork_at(folder, servers, ours, libraries)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    ours.detach()  # open until this process ends, however it ends
    return str(folder / "socket")


def _fork_at(folder: Path, servers: socket.socket, ours: socket.socket, libraries: Sequence[str]) -> None:
    """Fork the server to a socket in a folder, which is its own from then on."""
    try:
        with servers, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(folder / "socket"))
            listener.listen(128)
            if os.fork() == 0:
                ours.close()
                _serve(listener, servers, folder, list(libraries))
    except OSError:
        shutil.rmtree(folder)
        raise


def needs_own_start(environment: Mapping[str, str]) -> bool:
    """Whether a worker with these variables cannot be a fork, since libraries have read other values already."""
    return any(
        name.startswith(_READ_EARLY) and READ_WHEN_LOADED.get(name) != value
        for name, value in environment.items()
        if name != "TORCHDYNAMO_DISABLE"
    )


def _read_before(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that are read before or while something is imported, and by which forks cannot differ."""
    return {
        name: value for name, value in environment.items() if name.startswith(_READ_EARLY) and name not in _READ_LATE
    }


def adopt(environment: Mapping[str, str]) -> None:
    """In a worker: give what is imported already the settings that it would have read from these variables."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and (threads := _wanted_threads(environment)):
        torch.set_num_threads(threads)


def _serve(listener: socket.socket, driver: socket.socket, folder: Path, libraries: list[str]) -> NoReturn:
    """Fork a worker for each request, until the driver has ended."""
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leaves no zombies
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
        while driver not in (ready := select.select([listener, driver], [], [], 0 if libraries else None)[0]):
            if ready:
                _fork_worker(listener, driver)
            elif libraries:
                with suppress(Exception), importing():  # whoever needs it will say what is wrong with it
                    importlib.import_module(libraries.pop(0))
                if _num_threads() > 1:
                    break  # not to be forked any more
                gc.freeze()
        else:
            listener.close()
            _end_workers()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


def _end_workers() -> None:
    """Kill what does not end with the driver by itself: a worker that had yet to meet its raylet tries for a minute."""
    end = time.monotonic() + _LAST_WORDS_S
    while (workers := _children()) and time.monotonic() < end:
        time.sleep(0.05)
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def _children() -> list[int]:
    """Processes that this one has forked, where the kernel lists them."""
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []


def _fork_worker(listener: socket.socket, driver: socket.socket) -> None:
    """Answer one request; what is wrong with it leaves its sender without an answer."""
    connection, _ = listener.accept()
    with connection, suppress(OSError, ValueError):
        start, descriptors = receive_start(connection)
        can_fork = _read_before(start.environment) == _read_before(os.environ)
        if can_fork and os.fork() == 0:
            for end in (connection, listener, driver):
                end.close()
            _become_worker(start, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if can_fork:
            connection.sendall(b"1")


def _become_worker(start: WorkerStart, descriptors: Sequence[int]) -> NoReturn:
    """Run a program as if this process had been started with it."""
    status = 1
    try:
        _forget_the_driver()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        _open_streams()
        start.take_limits()
        os.setpgid(0, 0)
        os.chdir(start.folder)
        os.environ.clear()
        os.environ.update(start.environment)
        adopt(start.environment)
        sys.argv = list(start.arguments)
        sys.path[0] = str(Path(start.arguments[0]).parent)
        runpy.run_path(start.arguments[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # boundary: nothing of the driver's program may run here
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(status)


def _open_streams() -> None:
    """Python's streams on this process's own descriptors; the driver may have put others in their place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(number, "w" if number else "r", buffering=1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _forget_the_driver() -> None:
    """Undo what the driver's program has set for itself before the server was forked."""
    _forget_exit_handlers()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.getLogger().handlers.clear()
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("nemo_rl").setLevel(logging.NOTSET)
    sys.excepthook = sys.__excepthook__
    sys.settrace(None)
    sys.setprofile(None)
    gc.enable()
    sys.modules["numpy"].random.seed()  # Python's own generator does so by itself


def _forget_exit_handlers() -> None:
    """Leave to the driver what it does when it ends, such as removing its temporary folders."""
    atexit._clear()
    finalize: Any = weakref.finalize
    finalize._registry.clear()
    finalize._registered_with_atexit = False
    multiprocessing_util: Any = multiprocessing.util
    for handler in (logging.shutdown, multiprocessing_util._exit_function):
        atexit.register(handler)
