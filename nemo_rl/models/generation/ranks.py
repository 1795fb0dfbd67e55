"""Connect the worker processes of one engine. The first process calls all others, and all end together.

All processes of an engine form one process group. They are on one machine or on several. `RayWorkerGroup` numbers them
machine by machine. Invariant: a process sees the GPUs of the engine's processes on its machine, in the order of their
places.

A socket connects a process of an engine with each process that it calls:

    place 0 (runs the engine)             store at MASTER_ADDR:MASTER_PORT           place 1, 2 ... (ranks)
    enter_engine ────────────────────────── process group ─────────────────────────────────── enter_engine
    open_links ───────────────────────── address and key of a socket ───────────────── open_link
    link.call ──────────────────────────────────────────────────────────────────────► link.receive
    answer.result ◄────────────────────────────────────────────────────────────────── link.send

Sockets between processes of one machine are local. If one process is on another machine, all are TCP connections.
Invariant: an engine's processes end together. If the other end of a link is closed, a process exits at once without a
report, so the replacement of the engine finds only processes that have exited.
"""

import asyncio
import functools
import json
import logging
import os
import pickle
import secrets
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any, NamedTuple

import ray
import torch
import torch.distributed as dist

from nemo_rl.distributed.ranks.process_group import address_towards, choose_interface, open_store
from nemo_rl.host.boundary import Boundary
from nemo_rl.host.device import device_for, gpu_is_in_use
from nemo_rl.models.generation.interfaces import EngineSettings, GenerationRequest, GenerationResult, engine_of
from nemo_rl.utils.errors import GenerationError

_TIMEOUT = timedelta(minutes=30)
"""Time limit for processes to meet. It is longer than every start deadline, because a missing process usually died."""


@dataclass(frozen=True)
class Meeting:
    """The processes of an engine, as one of them sees them."""

    store: dist.Store
    """Store that all processes share."""
    place: int
    """Number of this process, which is its rank in the process group."""
    machines: tuple[int, ...]
    """Machine of each process, given as the place of its first process."""
    address: str = "127.0.0.1"
    """Address at which other processes reach the machine of this process."""

    @property
    def machine(self) -> int:
        """Machine of this process."""
        return self.machines[self.place]

    @property
    def local_place(self) -> int:
        """Number of this process among the processes of its machine, and the index of its GPU."""
        return self.machines[: self.place].count(self.machine)

    def is_near(self, places: Iterable[int]) -> bool:
        """Return whether these places are on the machine of this process."""
        return all(self.machines[place] == self.machine for place in places)


def meet(settings: EngineSettings) -> Meeting:
    """Return the meeting of this process with the other processes of its engine. RANK is its number."""
    _, place = engine_of(int(os.environ["RANK"]), settings.num_workers)
    return enter_engine(settings.device, place, settings.num_workers)


@functools.cache
def enter_engine(device: str, place: int, num_places: int) -> Meeting:
    """Form the default process group of an engine, and make its GPUs of this machine visible.

    The first call does this, and later calls return its result. vLLM checks which of its GPUs can access each other, so
    every process must see all of the engine's GPUs on its machine in the same order.

    Args:
        device: "cpu" or "cuda".
        place: number of this process.
        num_places: number of processes of the engine.

    Raises:
        GenerationError: this process has already used a GPU.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    kind = device_for(uses_gpu=device != "cpu")
    choose_interface(address)
    own_address = address_towards(address) or address
    store = open_store(address, port, place, num_places, _TIMEOUT)
    names = _shared(store, "machine", place, num_places, _name_of_machine())
    meeting = Meeting(store, place, tuple(names.index(name) for name in names), own_address)
    if kind.is_gpu:
        if num_places > 1 and gpu_is_in_use():
            raise GenerationError(
                f"Process {place} of an engine has used a GPU before it met the others, so it cannot see their GPUs "
                "any more. Something that it imports starts CUDA: look at policy.generation.engine.env_vars and at "
                "modules of your own that the engine loads."
            )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", str(meeting.local_place))
        gpus = _shared(store, "gpu", place, num_places, visible)
        near = [gpu for gpu, machine in zip(gpus, meeting.machines, strict=True) if machine == meeting.machine]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(near)
    dist.init_process_group(kind.collective_backend, store=store, rank=place, world_size=num_places)
    return meeting


def _name_of_machine() -> str:
    """Return a name that all processes of a machine share: Ray's id of the node, if Ray is running."""
    return ray.get_runtime_context().get_node_id() if ray.is_initialized() else os.environ.get("NODE_RANK", "0")


def _shared(store: dist.Store, name: str, place: int, num_places: int, own: str) -> tuple[str, ...]:
    """Send a text to all processes, and return the texts of all processes by their places."""
    store.set(f"{name} of {place}", own)
    return tuple(store.get(f"{name} of {other}").decode() for other in range(num_places))


logger = logging.getLogger(__name__)


class RankCall(NamedTuple):
    """Request of place 0 to a rank."""

    method: str | Callable[..., Any]
    """Name of a method of the served object, or an importable function that gets this object as its first argument."""
    args: tuple[Any, ...]
    """Positional arguments."""
    kwargs: dict[str, Any]
    """Keyword arguments."""
    wants_answer: bool
    """Whether the rank sends a `CallOutcome` even if the call succeeds."""


class CallOutcome(NamedTuple):
    """Result of a call: a value, or the traceback of a failure."""

    value: Any
    failure: str | None = None


class RankAnswer(Future[Any]):
    """Future of the value of a call. `result` reads it from the link."""

    def __init__(self, link: "Link"):
        super().__init__()
        self._link = link

    def result(self, timeout: float | None = None) -> Any:
        """Wait for this value and the values of all earlier calls.

        Raises:
            RuntimeError: this call or an earlier one failed in its rank.
        """
        while not self.done():
            self._link.take_answer()
        return super().result(timeout)


def call_all(links: Sequence["Link"], call: RankCall, answering: Sequence[bool]) -> list[RankAnswer | None]:
    """Send a call to several ranks. The call is pickled once for ranks that answer, and once for all others."""
    forms = {wants: call._replace(wants_answer=wants) for wants in set(answering)}
    packed = {wants: pickle.dumps(form, protocol=pickle.HIGHEST_PROTOCOL) for wants, form in forms.items()}
    return [link.call_packed(packed[wants], wants_answer=wants) for link, wants in zip(links, answering, strict=True)]


class Link:
    """One end of the socket between place 0 and a rank.

    Args:
        other: name of the process at the other end, for messages.
    """

    def __init__(self, connection: Connection, other: str):
        self._connection = connection
        self._other = other
        self._due: deque[RankAnswer] = deque()

    def when_it_brings(self, loop: asyncio.AbstractEventLoop, receive: Callable[[], object]) -> None:
        """Let an event loop call `receive` whenever a message starts to arrive. `receive` must read the message."""
        descriptor = self._connection.fileno()
        loop.add_reader(descriptor, receive)
        # uvloop, on which Ray's actors run, makes a watched socket non-blocking (libuv's `uv_poll_init`). Reading a
        # partial message or writing to a full buffer would then fail.
        os.set_blocking(descriptor, True)

    def send(self, message: object) -> None:
        """Send a picklable message. Tensors are copied."""
        self._send(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def _send(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except OSError as reason:
            self._end(reason)

    def receive(self) -> Any:
        """Wait for the next message and return it."""
        try:
            received = self._connection.recv_bytes()
        except (OSError, EOFError) as reason:
            self._end(reason)
        return pickle.loads(received)

    def call(self, call: RankCall) -> RankAnswer | None:
        """Send a call to a rank. Return None if no answer is wanted."""
        return call_all([self], call, [call.wants_answer])[0]

    def call_packed(self, packed: bytes, *, wants_answer: bool) -> RankAnswer | None:
        """Send a pickled `RankCall`, as `call` does."""
        self._send(packed)
        if not wants_answer:
            return None
        self._due.append(RankAnswer(self))
        return self._due[-1]

    def take_answer(self) -> None:
        """Wait for the oldest pending answer.

        Raises:
            RuntimeError: This call failed, or an earlier call whose answer vLLM did not read.
        """
        outcome: CallOutcome = self.receive()
        answer = self._due.popleft() if self._due else None
        if outcome.failure is not None:
            failure = RuntimeError(f"{self._other} failed:\n{outcome.failure}")
            if answer is not None:
                answer.set_exception(failure)
            raise failure
        assert answer is not None, "only failures come unasked"
        answer.set_result(outcome.value)

    def end_if_alone(self, patience_s: float) -> None:
        """End this process if the other end is closed, now or after at most `patience_s`.

        Raises:
            RuntimeError: the other end is open, and the call failed there.
        """
        while self._connection.poll(patience_s):
            self.take_answer()

    def _end(self, reason: Exception) -> Any:
        logger.error("%s is gone (%r); this process of the same engine ends too.", self._other, reason)
        sys.stderr.flush()
        os._exit(1)


def open_links(meeting: Meeting, name: str, places: Sequence[int]) -> list[Link]:
    """Open links to processes that call `open_link` with the same name. Return them in the order of `places`."""
    if not places:
        return []
    key, links = secrets.token_bytes(32), dict[int, Link]()
    with _listener(meeting, places, key) as listener:
        address = listener.address
        text = address.decode() if isinstance(address, bytes) else address  # addresses without a file are bytes
        meeting.store.set(name, json.dumps([text, key.hex()]))
        while len(links) < len(places):
            connection = _prompt(listener.accept())
            place = connection.recv()
            links[place] = Link(connection, f"Worker {place}")
    return [links[place] for place in places]


def open_link(meeting: Meeting, name: str, to: int) -> Link:
    """Connect to the process that calls `open_links` with the same name. `to` is its number in messages."""
    address, key = json.loads(meeting.store.get(name))
    connection = _dial(address, bytes.fromhex(key))
    connection.send(meeting.place)
    return Link(connection, f"Worker {to}")


def _listener(meeting: Meeting, places: Sequence[int], key: bytes) -> Listener:
    if not meeting.is_near(places):
        family = "AF_INET6" if ":" in meeting.address else "AF_INET"
        return Listener((meeting.address, 0), family=family, backlog=len(places), authkey=key)
    # # On Linux, the socket does not need a file.
    address = f"\0nemo_rl-{secrets.token_hex(16)}" if sys.platform == "linux" else None
    return Listener(address, family="AF_UNIX", backlog=len(places), authkey=key)


def _dial(address: str | list[Any], key: bytes) -> Connection:
    if isinstance(address, str):
        return Client(address, family="AF_UNIX", authkey=key)
    # # `Client` would treat every pair of host and port as an IPv4 address.
    connection = Connection(socket.create_connection((address[0], address[1])).detach())
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    return _prompt(connection)


def _prompt(connection: Connection) -> Connection:
    """Disable Nagle's algorithm on a TCP connection, so that small messages are sent at once."""
    with socket.socket(fileno=os.dup(connection.fileno())) as shared:
        if shared.family != socket.AF_UNIX:
            shared.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


_PATIENCE_S = 2.0
"""Seconds until the death of a rank that interrupted another rank's call is noticed."""


@contextmanager
def ending_if_alone(links: Sequence[Link]) -> Iterator[None]:
    """Run a block. If it fails because the process at the other end of a link has exited, end this process."""
    try:
        yield
    except Exception:
        for link in links:
            link.end_if_alone(_PATIENCE_S)
        raise


class ServedRank:
    """Workers 1, 2 ... of an engine. Each is an `Engine` that executes the calls of worker 0.

    Calls run between two callbacks of the event loop, like the engine's steps in worker 0. A subclass loads weights,
    and overrides the methods of `Engine` that worker 0 does not call for all ranks.
    """

    def serve(self, link: Link, execute: Callable[[RankCall], Any]) -> None:
        """Report to the other end of a link that this process is ready, and execute its calls from now on."""
        link.send(CallOutcome(None))
        link.when_it_brings(asyncio.get_running_loop(), partial(self._do_next, link, execute))

    def _do_next(self, link: Link, execute: Callable[[RankCall], Any]) -> None:
        call: RankCall = link.receive()
        with Boundary(Exception) as caught:  # worker 0 gets the error or notices that this rank ended
            outcome = CallOutcome(execute(call))
        if caught:
            outcome = CallOutcome(None, "".join(traceback.format_exception(caught.take())))
        if call.wants_answer or outcome.failure is not None:
            link.send(outcome)
        if not call.wants_answer and outcome.failure is not None:
            # Worker 0 has usually failed too and reports why. If it waits for this rank instead, only the exit of this
            # process ends its wait.
            logger.error("A step failed, so this process ends.\n%s", outcome.failure)
            asyncio.get_running_loop().call_later(2 * _PATIENCE_S, os._exit, 1)

    async def generate(self, request_id: str, request: GenerationRequest) -> GenerationResult:
        """Raise an error, because only worker 0 gets requests (`Engine.generate`)."""
        raise NotImplementedError("Requests go to worker 0 of an engine.")

    async def abort(self, request_ids: Collection[str]) -> None:
        """Do nothing, because this rank has no requests (`Engine.abort`)."""

    async def begin_weight_update(self) -> None:
        """Do nothing, because weights need no preparation here (`Engine.begin_weight_update`)."""

    async def finish_weight_update(self, version: int) -> list[str]:
        """Return no names, because worker 0 reports missing tensors of all ranks by default."""
        return []

    async def layer_outputs(self, token_ids: list[int]) -> list[torch.Tensor]:
        """Return nothing, because worker 0 collects hidden states (`Engine.layer_outputs`)."""
        return []

    async def sleep(self) -> None:
        """Do nothing by default (`Engine.sleep`)."""

    async def wake_up(self) -> None:
        """Do nothing by default (`Engine.wake_up`)."""
