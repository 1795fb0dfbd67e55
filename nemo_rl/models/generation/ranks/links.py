"""Connect a process of an engine with others of it: a socket for the calls of each.

    place 0 (runs the engine)             store at MASTER_ADDR:MASTER_PORT           place 1, 2 ... (ranks)
    enter_engine ────────────────────────── process group (`meeting`) ───────────────────────── enter_engine
    open_links ───────────────────────── address and key of a socket ───────────────── open_link
    link.call ──────────────────────────────────────────────────────────────────────► link.receive
    answer.result ◄────────────────────────────────────────────────────────────────── link.send

Sockets between processes of one machine are local; if one is on another machine, all are TCP connections. Invariant: an
engine's processes end together. A process whose link is closed at the other end exits immediately and reports nothing
else, so the code that replaces the engine only sees processes that have exited.
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any, NamedTuple

from nemo_rl.models.generation.ranks.meeting import Meeting

logger = logging.getLogger(__name__)


class Call(NamedTuple):
    """Request of place 0 to a rank."""

    method: str | Callable[..., Any]
    """Name of a method of what the rank serves, or an importable function that takes it first."""
    args: tuple[Any, ...]
    """Positional arguments."""
    kwargs: dict[str, Any]
    """Keyword arguments."""
    wants_answer: bool
    """Whether the rank sends an `Outcome` even if the call succeeds."""


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


def call_all(links: Sequence["Link"], call: Call, answering: Sequence[bool]) -> list[Answer | None]:
    """Send a call to several ranks, pickled once for those whose answers are wanted and once for the others."""
    forms = {wants: call._replace(wants_answer=wants) for wants in set(answering)}
    packed = {wants: pickle.dumps(form, protocol=pickle.HIGHEST_PROTOCOL) for wants, form in forms.items()}
    return [link.call_packed(packed[wants], wants_answer=wants) for link, wants in zip(links, answering, strict=True)]


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

    def call(self, call: Call) -> Answer | None:
        """Send a call to a rank; return None if no answer is wanted."""
        return call_all([self], call, [call.wants_answer])[0]

    def call_packed(self, packed: bytes, *, wants_answer: bool) -> Answer | None:
        """Send a pickled `Call`; as `call`."""
        self._send(packed)
        if not wants_answer:
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


def open_links(meeting: Meeting, name: str, places: Sequence[int]) -> list[Link]:
    """Open links to other places, which call `open_link` with the same name; returns them in the order of `places`."""
    if not places:
        return []
    key, links = secrets.token_bytes(32), dict[int, Link]()
    with _listener(meeting, places, key) as listener:
        address = listener.address
        text = address.decode() if isinstance(address, bytes) else address  # the system returns names of no file so
        meeting.store.set(name, json.dumps([text, key.hex()]))
        while len(links) < len(places):
            connection = _prompt(listener.accept())
            place = connection.recv()
            links[place] = Link(connection, f"Worker {place}")
    return [links[place] for place in places]


def open_link(meeting: Meeting, name: str, to: int) -> Link:
    """Open the link to the place that calls `open_links` with this name."""
    address, key = json.loads(meeting.store.get(name))
    connection = _dial(address, bytes.fromhex(key))
    connection.send(meeting.place)
    return Link(connection, f"Worker {to}")


def _listener(meeting: Meeting, places: Sequence[int], key: bytes) -> Listener:
    if not meeting.is_near(places):
        family = "AF_INET6" if ":" in meeting.address else "AF_INET"
        return Listener((meeting.address, 0), family=family, backlog=len(places), authkey=key)
    # On Linux, use a socket without a file.
    address = f"\0nemo_rl-{secrets.token_hex(16)}" if sys.platform == "linux" else None
    return Listener(address, family="AF_UNIX", backlog=len(places), authkey=key)


def _dial(address: str | list[Any], key: bytes) -> Connection:
    if isinstance(address, str):
        return Client(address, family="AF_UNIX", authkey=key)
    # `Client` takes every pair of host and port for one of IPv4.
    connection = Connection(socket.create_connection((address[0], address[1])).detach())
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    return _prompt(connection)


def _prompt(connection: Connection) -> Connection:
    """Let a connection over TCP send small messages at once, instead of waiting for the receipt of earlier ones."""
    with socket.socket(fileno=os.dup(connection.fileno())) as shared:
        if shared.family != socket.AF_UNIX:
            shared.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
