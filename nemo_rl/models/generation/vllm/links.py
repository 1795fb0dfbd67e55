"""Connect place 0 of an engine with the others: a socket for the calls of each rank.

    place 0 (runs the engine)             store at MASTER_ADDR:MASTER_PORT           place 1, 2 ... (ranks)
    enter_engine ────────────────────────── process group (`meeting`) ───────────────────────── enter_engine
    open_links ───────────────────────── address and key of a socket ───────────────── open_link
    link.call ──────────────────────────────────────────────────────────────────────► link.receive
    answer.result ◄────────────────────────────────────────────────────────────────── link.send

The sockets of an engine on one machine are local, those of an engine on several machines are TCP connections to the
machine of place 0. Invariant: an engine's processes end together. A process whose link is closed at the other end exits immediately and
reports nothing else, so the code that replaces the engine only sees processes that have exited.
"""

import asyncio
import json
import logging
import os
import pickle
import secrets
import socket
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NamedTuple

from nemo_rl.models.generation.vllm.meeting import Meeting

logger = logging.getLogger(__name__)


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


def open_links(meeting: Meeting) -> list[Link]:
    """Open the links of place 0 to places 1, 2 ..., in this order."""
    key, num_links = secrets.token_bytes(32), len(meeting.machines) - 1
    links: dict[int, Link] = {}
    with _listener(meeting, key, num_links) as listener:
        address = listener.address
        text = address.decode() if isinstance(address, bytes) else address  # the system returns names of no file so
        meeting.store.set("links", json.dumps([text, key.hex()]))
        while len(links) < num_links:
            connection = _prompt(listener.accept())
            place = connection.recv()
            links[place] = Link(connection, f"Worker {place}")
    return [links[place] for place in sorted(links)]


def open_link(meeting: Meeting) -> Link:
    """Open the link of a rank to place 0."""
    address, key = json.loads(meeting.store.get("links"))
    connection = _prompt(Client(address if isinstance(address, str) else tuple(address), authkey=bytes.fromhex(key)))
    connection.send(meeting.place)
    return Link(connection, "Worker 0")


def _listener(meeting: Meeting, key: bytes, num_links: int) -> Listener:
    if not meeting.is_on_one_machine:
        return Listener((os.environ["MASTER_ADDR"], 0), family="AF_INET", backlog=num_links, authkey=key)
    # On Linux, use a socket without a file.
    address = f"\0nemo_rl-{secrets.token_hex(16)}" if sys.platform == "linux" else None
    return Listener(address, family="AF_UNIX", backlog=num_links, authkey=key)


def _prompt(connection: Connection) -> Connection:
    """Let a TCP connection send small messages at once, instead of waiting for the receipt of earlier ones."""
    with socket.socket(fileno=os.dup(connection.fileno())) as shared:
        if shared.family == socket.AF_INET:
            shared.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
