"""Run a worker process, which is a host actor with one worker object.

`worker_groups` creates hosts by the name of the worker's class. `worker_logs` finds a worker's logs and stacks by the
identity reported here. Invariant: the class is imported only in the worker process, after its environment is set, so
the controller needs no backend library and thread settings take effect. When the controller or the raylet is killed, a
thread of Ray ends the process and its children, even if they are blocked in C code. This file does not import torch, so
a worker without tensors starts in one second instead of five.
"""

import faulthandler
import importlib
import inspect
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from nemo_rl.distributed.ranks.rendezvous import hold_port
from nemo_rl.distributed.workers.start_phases import (
    ARGUMENTS,
    CONSTRUCTOR,
    IMPORTS,
    add_phase,
    start_phase,
    taken_phases,
)
from nemo_rl.files.trusted_code import accept_code
from nemo_rl.optimizations.fork_server import adopt
from nemo_rl.utils.imports import import_dotted

STACK_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """A process of the cluster."""

    pid: int
    """Process id on the node."""
    start_ticks: int | None
    """Kernel start time of the process. It distinguishes the process from a later one with the same pid."""
    node_id: str
    """Ray's id of the node."""


@dataclass(frozen=True, kw_only=True)
class LoggedProcess(ProcessIdentity):
    """A process whose output is written to files."""

    log_paths: tuple[str, ...]
    """Files on the node that receive the process's stdout and stderr."""


def this_process() -> LoggedProcess:
    """Return the identity of this process, in which an actor runs."""
    node_id, pid = ray.get_runtime_context().get_node_id(), os.getpid()
    ticks = process_start_ticks(pid)
    return LoggedProcess(pid=pid, start_ticks=ticks, node_id=node_id, log_paths=redirected_outputs())


@dataclass(frozen=True, kw_only=True)
class WorkerIdentity(LoggedProcess):
    """Rank, process and node of a worker, reported by the worker."""

    name: str
    """Actor name, `<prefix>-<node>-<local rank>`."""
    rank: int
    """Rank of the worker in its group."""
    node_ip: str
    """Address of the node."""
    stacks_path: str
    """File on that node that receives stacks on `STACK_SIGNAL`."""

    def __str__(self) -> str:
        return f"{self.name} (rank {self.rank}, node {self.node_ip}, pid {self.pid})"


class WorkerHost:
    """Actor that builds one worker object and calls its methods, one at a time.

    Args:
        name: actor name, used in logs and `repr`.
        rank: position of the worker in its group.
        environment: variables to set before anything is imported.
    """

    def __init__(self, name: str, rank: int, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        adopt(environment)
        self._name = name
        self._worker: Any = None
        configure_logging(name)
        log_paths = redirected_outputs()
        folder = Path(log_paths[-1]).parent if log_paths else Path(tempfile.mkdtemp(prefix="nemo_rl-"))
        stacks_path = folder / f"stacks-{os.getpid()}.txt"
        self._stacks_file = stacks_path.open("w")
        faulthandler.register(STACK_SIGNAL, file=self._stacks_file, all_threads=True)
        context = ray.get_runtime_context()
        self._identity = WorkerIdentity(
            name=name,
            rank=rank,
            pid=os.getpid(),
            start_ticks=process_start_ticks(os.getpid()),
            node_id=context.get_node_id(),
            node_ip=ray.util.get_node_ip_address(),
            log_paths=log_paths,
            stacks_path=str(stacks_path),
        )
        self._hosted_at = time.monotonic()

    def report_identity(self) -> WorkerIdentity:
        """Return the identity of this worker, even before the worker object is built."""
        return self._identity

    def hold_port(self, low: int | None, high: int | None) -> tuple[str, int]:
        """Hold a free port for the store of a process group (`rendezvous.hold_port`)."""
        return hold_port(self._identity.node_ip, low, high)

    def build(
        self,
        class_fqn: str,
        arguments: tuple[tuple[Any, ...], dict[str, Any], frozenset[str]],
        meeting_point: tuple[str, int] | None,
    ) -> dict[str, float]:
        """Import `pkg.module.Class` and construct the worker object, which finds its peers at `meeting_point`.

        Returns:
            Seconds of the phases of its start (`start_phases`).
        """
        add_phase(ARGUMENTS, time.monotonic() - self._hosted_at)
        args, kwargs, code = arguments
        accept_code(code)
        if meeting_point is not None:
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = meeting_point[0], str(meeting_point[1])
        with start_phase(IMPORTS):
            worker_class = import_dotted(class_fqn, ValueError, f"worker class {class_fqn!r}", "Name it pkg.Class.")
        with start_phase(CONSTRUCTOR):
            self._worker = worker_class(*args, **kwargs)
        return taken_phases()

    def call(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker object. Tensors in the result are sent without copies."""
        return packed(getattr(self._worker, method_name)(*args, **kwargs))

    def __repr__(self) -> str:
        return self._name


class AsyncWorkerHost(WorkerHost):
    """Actor whose worker's coroutine methods run concurrently on one asyncio loop.

    Plain methods are allowed, but block the loop while they run.
    """

    def __init__(self, name: str, rank: int, environment: Mapping[str, str]) -> None:
        super().__init__(name, rank, environment)
        self._running: list[Coroutine[Any, Any, Any]] = []

    async def call(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker object, and await its result if it is a coroutine."""
        result = getattr(self._worker, method_name)(*args, **kwargs)
        if not inspect.iscoroutine(result):
            return packed(result)
        self._running.append(result)
        try:
            return packed(await result)
        finally:
            self._running.remove(result)

    async def describe_coroutines(self) -> str:
        """Describe where each running coroutine waits. Thread stacks show only the event loop."""
        return "\n".join(_waits_at(coroutine) for coroutine in self._running)


def packed(value: Any) -> Any:
    """Pack the tensors in a result for sending. Without torch in the process, there are no tensors."""
    if "torch" not in sys.modules:
        return value
    transport = importlib.import_module("nemo_rl.distributed.tensor_transport")
    return transport.pack_tensors(value)


def configure_logging(name: str) -> None:
    """Send log records to stderr: those of `nemo_rl` at NRL_LOG_LEVEL (INFO), all others at WARNING."""
    logging.basicConfig(
        level=logging.WARNING,
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s [{name}] %(name)s: %(message)s",
        force=True,
    )
    logging.getLogger("nemo_rl").setLevel(os.environ.get("NRL_LOG_LEVEL", "INFO").upper())


def process_start_ticks(pid: int) -> int | None:
    """Return a process's kernel start time in clock ticks, or None if it has ended or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _waits_at(coroutine: Coroutine[Any, Any, Any]) -> str:
    """Return the chain of awaits, outermost first, up to a future or an awaitable of another library."""
    lines = ["Coroutine (most recent call last):"]
    inner: Any = coroutine
    while inspect.iscoroutine(inner) and inner.cr_frame is not None:
        code = inner.cr_code
        lines.append(f'  File "{code.co_filename}", line {inner.cr_frame.f_lineno} in {code.co_name}')
        inner = inner.cr_await
    return "\n".join(lines)


def redirected_outputs() -> tuple[str, ...]:
    """Return the files to which Ray has redirected this process's stdout and stderr."""
    paths = []
    for descriptor in (1, 2):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if os.path.isfile(target) and target not in paths:
            paths.append(target)
    return tuple(paths)
