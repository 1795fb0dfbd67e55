"""Connect the processes of one engine: a process group for the model, and a socket for the calls of each rank.

    place 0 (runs the engine)             store at MASTER_ADDR:MASTER_PORT           place 1, 2 ... (ranks)
    enter_engine ──────────────────── process group, GPUs of all ──────────────────── enter_engine
    open_links ───────────────────────── address and key of a socket ───────────────── open_link
    link.call ──────────────────────────────────────────────────────────────────────► link.receive
    answer.result ◄────────────────────────────────────────────────────────────────── link.send

Invariant: an engine's processes end together. A process whose link is closed at the other end exits immediately and
reports nothing else, so the code that replaces the engine only sees processes that have exited.
"""

import asyncio
import json
import logging
import os
import pickle
import secrets
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NamedTuple

import torch.distributed as dist

from nemo_rl.distributed.ranks.process_group import choose_interface, open_store
from nemo_rl.host.device import Device

logger = logging.getLogger(__name__)

_MEETING_TIMEOUT = timedelta(minutes=30)
"""Longer than every deadline for starting engines; a process that does not come has usually died."""


class Call(NamedTuple):
    """Request of place 0 to a rank.

    Attributes:
        method: name of a method of vLLM's worker, or an importable function that takes the worker first.
        args: positional arguments.
        kwargs: keyword arguments.
        wants_answer: whether the rank sends an `Outcome` even if the call succeeds.
    """

    method: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wants_answer: bool


class Outcome(NamedTuple):
    """Result of a call: a value, or the traceback of a failure."""

    value: Any
    failure: str | None = None


class Answer(Future[Any]):
    """Value of a call; it is read from the link when `result` is called."""

    def __init__(self, link: "Link"):
        super().__init__()
        self._link = link

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the value, and for the values of all earlier calls.

        Raises:
            RuntimeError: this call or an earlier one failed in its rank.
        """
        while not self.done():
            self._link.take_answer()
        return super().result(timeout)


class Link:
    """One end of the socket between place 0 and a rank.

    Args:
        connection: connection to the other end.
        other: name of the process at the other end, for messages.
    """

    def __init__(self, connection: Connection, other: str):
        self._connection = connection
        self._other = other
        self._due: deque[Answer] = deque()

    def when_it_brings(self, loop: asyncio.AbstractEventLoop, receive: Callable[[], object]) -> None:
        """Let an event loop call a function whenever a message starts to arrive; the function receives the message."""
        descriptor = self._connection.fileno()
        loop.add_reader(descriptor, receive)
        # uvloop, on which Ray's actors run, makes a watched socket non-blocking (libuv's `uv_poll_init`). Reading a
        # partial message or writing to a full buffer would then fail.
        os.set_blocking(descriptor, True)

    def send(self, message: object) -> None:
        """Send a picklable message; tensors are sent as copies."""
        try:
            self._connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
        except OSError as reason:
            self._end(reason)

    def receive(self) -> Any:
        """Wait for the next message and return it."""
        try:
            received = self._connection.recv_bytes()
        except (OSError, EOFError) as reason:
            self._end(reason)
        return pickle.loads(received)

    def call(self, call: Call) -> Answer | None:
        """Send a call to a rank; return None if no answer is wanted."""
        self.send(call)
        if not call.wants_answer:
            return None
        self._due.append(Answer(self))
        return self._due[-1]

    def take_answer(self) -> None:
        """Wait for the oldest pending answer.

        Raises:
            RuntimeError: its call failed. vLLM does not read all answers, so the error may appear at a later one.
        """
        outcome: Outcome = self.receive()
        answer = self._due.popleft() if self._due else None
        if outcome.failure is not None:
            failure = RuntimeError(f"{self._other} failed:\n{outcome.failure}")
            if answer is not None:
                answer.set_exception(failure)
            raise failure
        assert answer is not None, "only failures come unasked"
        answer.set_result(outcome.value)

    def end_if_alone(self, patience_s: float) -> None:
        """End this process if the other end is closed, now or within `patience_s`.

        Raises:
            RuntimeError: the other end is open and its call has failed.
        """
        while self._connection.poll(patience_s):
            self.take_answer()

    def _end(self, reason: Exception) -> Any:
        logger.error("%s is gone (%r); this process of the same engine ends too.", self._other, reason)
        sys.stderr.flush()
        os._exit(1)


def enter_engine(device: str, place: int, num_places: int) -> dist.Store:
    """Form the default process group of an engine's processes, and let each process see the GPUs of all.

    vLLM checks which of its GPUs can access each other directly, so every process needs all of them in the same order.

    Args:
        device: "cpu" or "cuda".
        place: number of this process: its rank in the group and from now on the index of its GPU.
        num_places: number of processes of the engine.

    Returns:
        A store that all of them share.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    kind = Device("cuda" if device == "cuda" else "cpu")
    choose_interface(address)
    store = open_store(address, port, place, num_places, _MEETING_TIMEOUT)
    if kind.is_gpu:
        store.set(f"gpu of {place}", os.environ.get("CUDA_VISIBLE_DEVICES", str(place)))
        gpus = [store.get(f"gpu of {other}").decode() for other in range(num_places)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    dist.init_process_group(kind.collective_backend, store=store, rank=place, world_size=num_places)
    return store


def open_links(store: dist.Store, num_places: int) -> list[Link]:
    """Open the links of place 0 to places 1, 2 ..., in this order."""
    key = secrets.token_bytes(32)
    # On Linux, use a socket without a file.
    address = f"\0nemo_rl-{secrets.token_hex(16)}" if sys.platform == "linux" else None
    links: dict[int, Link] = {}
    with Listener(address, family="AF_UNIX", authkey=key) as listener:
        store.set("links", json.dumps([address or listener.address, key.hex()]))
        while len(links) < num_places - 1:
            connection = listener.accept()
            place = connection.recv()
            links[place] = Link(connection, f"Worker {place}")
    return [links[place] for place in sorted(links)]


def open_link(store: dist.Store, place: int) -> Link:
    """Open the link of a rank to place 0."""
    address, key = json.loads(store.get("links"))
    connection = Client(address, family="AF_UNIX", authkey=bytes.fromhex(key))
    connection.send(place)
    return Link(connection, "Worker 0")
