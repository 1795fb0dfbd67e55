"""Fork workers from one process that has already imported the libraries that all workers import.

Importing torch, transformers and Ray takes four processor seconds and 400 MB in each process. The program of a run on
the CPU imports them and then forks this server, before it starts threads or reads anything but its configuration:

    driver (launch)  import torch ... ──► fork ──► init_ray ──► ... the run
                                           │          │ start a worker
    fork server                            └─ serve ◄─┤ `ray_worker.py`, in place of Ray's script, sends its arguments
    worker (child of the server)               └─ fork, then Ray's worker program           and environment, and ends

Memory pages that no process changes exist only once. Ray starts a worker itself if it has its own Python or packages,
or a variable that libraries read while they are imported (`needs_own_start`). Ray also starts every worker where there
is no server: on GPUs (CUDA does not survive a fork), in a joined cluster, in notebooks, in a program with threads.

Invariant: a worker cannot detect how it was started, except by the time it took. Its environment, folder, arguments,
outputs, process group and signals are those that the raylet set; its threads are those of its environment.
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

from nemo_rl.host.capacity import usable_cores
from nemo_rl.host.stop_signals import STOP_SIGNALS
from nemo_rl.optimizations.process_tuning import share_one_heap
from nemo_rl.optimizations.ray_worker import WorkerStart, receive_start
from nemo_rl.utils.addresses import cluster_address
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
"""Modules that the server imports. Ray is not one of them: it reads the identity of its worker when it is imported."""
READ_WHEN_LOADED = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "20000"}
"""Variables with which OpenMP is loaded: Ray's default for workers, and the setting of policy ranks. `adopt` sets
PyTorch's number of threads in each process."""
_READ_EARLY = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "LD_", "PYTHON", "XDG_"),
    *("HF_", "TRANSFORMERS_", "TORCH", "PYTORCH_"),
)
"""Prefixes of variables that libraries read before or while they are imported."""
_READ_LATE = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "TORCHDYNAMO_DISABLE")
"""Variables with these prefixes that forks may still set: `adopt` applies the first, the run sets the second for its
ranks, and the third is read at each use."""

_END_GRACE_S = 2.0
"""Number of seconds in which workers may end by themselves after the driver has ended."""

_socket: str | None = None


def start_fork_server(libraries: Callable[[], Sequence[str]] = tuple) -> None:
    """Import `PRELOADED` in this process and fork the server, or do nothing if that is not safe.

    Call it once in a process, from its main thread. The server ends with this process.

    Args:
        libraries: returns, once `PRELOADED` is imported, modules that only some workers import and this process does
            not. The server imports them while it is idle. They must not start threads or read variables of workers.
    """
    global _socket
    if _socket is not None or sys.platform != "linux" or cluster_address():
        return
    if {"torch", "ray"} & sys.modules.keys():
        logger.debug("torch or ray is already imported: workers are not forked.")
        return
    _preload()
    more = libraries()
    if _num_threads() == 1:
        try:
            _socket = _fork_server(more)
        except OSError as error:  # no room in the folder for temporary files, or its name is too long for a socket
            logger.debug("Workers are not forked: %s.", error)
    else:
        logger.debug("This process has threads: workers are not forked.")
    sys.modules["torch"].set_num_threads(_wanted_threads(os.environ) or usable_cores())


def server_socket() -> str | None:
    """Return the path of the server's socket, or None if this process has no server."""
    return _socket


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _wanted_threads(environment: Mapping[str, str]) -> int:
    """Return the number of threads that OpenMP reads for the outermost level, or 0 if there is no valid number."""
    first = environment.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(first) if first.isdigit() else 0


def _preload() -> None:
    """Import `PRELOADED` with the variables of OpenMP that workers need."""
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
    """Fork the server and return the path of its socket."""
    ours, servers = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the program may have replaced or closed it
            stream.flush()
    # The objects that exist now stay, here and in the forks. A garbage collection would write to their memory pages.
    gc.collect()
    gc.freeze()
    # The program may exit on these signals, and only the server removes the folder. The server keeps them blocked,
    # since they are meant for the driver, and the server ends when the driver ends.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        folder = Path(tempfile.mkdtemp(prefix="nrl-fork-"))
        _fork_at(folder, servers, ours, libraries)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    ours.detach()  # stays open until this process ends, however it ends
    return str(folder / "socket")


def _fork_at(folder: Path, servers: socket.socket, ours: socket.socket, libraries: Sequence[str]) -> None:
    """Fork the server with a socket in a folder, which the server removes when it ends."""
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
    """Return whether a worker with these variables cannot be a fork, since libraries have already read other values."""
    return any(
        name.startswith(_READ_EARLY) and READ_WHEN_LOADED.get(name) != value
        for name, value in environment.items()
        if name != "TORCHDYNAMO_DISABLE"
    )


def _read_before(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that libraries read before they are imported, which must be the same in all forks."""
    return {
        name: value for name, value in environment.items() if name.startswith(_READ_EARLY) and name not in _READ_LATE
    }


def adopt(environment: Mapping[str, str]) -> None:
    """Apply to the imported libraries of a worker the settings that they would have read from these variables."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and (threads := _wanted_threads(environment)):
        torch.set_num_threads(threads)


def _serve(listener: socket.socket, driver: socket.socket, folder: Path, libraries: list[str]) -> NoReturn:
    """Fork a worker for each request, until the driver has ended."""
    try:
        os.setsid()
        share_one_heap()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leaves no zombies
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
        while driver not in (ready := select.select([listener, driver], [], [], 0 if libraries else None)[0]):
            if ready:
                _fork_worker(listener, driver)
            elif libraries:
                with suppress(Exception), importing():  # the worker that needs it reports the error
                    importlib.import_module(libraries.pop(0))
                if _num_threads() > 1:
                    break  # a process with threads must not be forked
                gc.freeze()
        else:
            listener.close()
            _end_workers()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


def _end_workers() -> None:
    """Kill workers that do not end with the driver. A worker that has not reached its raylet yet tries for a minute."""
    end = time.monotonic() + _END_GRACE_S
    while (workers := _children()) and time.monotonic() < end:
        time.sleep(0.05)
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def _children() -> list[int]:
    """Return the ids of the processes that this process has forked, or none if the kernel does not list them."""
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []


def _fork_worker(listener: socket.socket, driver: socket.socket) -> None:
    """Answer one request. If it is invalid, the sender starts the worker itself."""
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
    except BaseException:  # boundary: code of the driver's program must not run in a worker
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(status)


def _open_streams() -> None:
    """Open Python's standard streams on this process's own descriptors, because the driver may have replaced them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(number, "w" if number else "r", buffering=1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _forget_the_driver() -> None:
    """Undo the settings that the driver's program made for itself before the fork."""
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
    """Remove the driver's exit handlers, which for example remove its temporary folders."""
    atexit._clear()
    finalize: Any = weakref.finalize
    finalize._registry.clear()
    finalize._registered_with_atexit = False
    multiprocessing_util: Any = multiprocessing.util
    for handler in (logging.shutdown, multiprocessing_util._exit_function):
        atexit.register(handler)
