"""Requests and their answers, so that a request that a client sends again is answered once.

A client sends a request again when it was refused for a while, or when the connection is lost before or after the
answer. The packages openai and anthropic say so in a header. Invariant: an answer that no client waits for and none has
got is the first one that a repetition of its request gets; two requests that are meant as two get two answers.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from nemo_rl.agents.endpoint.calls import CallAnswer, CallError

type Answering = "asyncio.Task[list[CallAnswer]]"


class ClientGoneError(Exception):
    """The client has closed the connection before it got an answer."""


@dataclass(eq=False)
class Exchange:
    """A request and its answers."""

    task: Answering
    """Makes the answers."""
    num_waiting: int = 0
    """Clients that wait for them."""
    is_delivered: bool = False
    """A client that waited to the end has got them."""

    @property
    def is_lost(self) -> bool:
        """True if no client waits for the answers, and none has got them."""
        return self.num_waiting == 0 and not self.is_delivered

    @property
    def was_refused(self) -> bool:
        """True if the request has ended without answers."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    async def answers(self, gone: Awaitable[None]) -> list[CallAnswer]:
        """Wait for the answers, which are made even if the client goes away.

        Args:
            gone: ends when the client has closed the connection.

        Raises:
            ClientGoneError: it has, before the answers were there.
            CallError: the request is refused, its sample has ended, or the run fails.
        """
        left = asyncio.ensure_future(gone)
        ends: set[asyncio.Future[object]] = {self.task, left}  # type: ignore[arg-type]  # a set of futures is invariant
        self.num_waiting += 1
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if left.done():
                raise ClientGoneError
        finally:
            self.num_waiting -= 1
            left.cancel()
        if self.task.cancelled():
            raise CallError(401, "The sample of this key has ended.", "invalid_api_key")
        error = self.task.exception()
        if error is not None and not isinstance(error, CallError):
            raise CallError(500, f"The run cannot answer: {type(error).__name__}.", "engine_failed")
        answers = self.task.result()
        self.is_delivered = True
        return answers


@dataclass
class Exchanges:
    """The exchanges of a session, by the identity of their requests."""

    counts: Counter[str]
    """`retries` counts requests that were recognised as repetitions."""
    _known: defaultdict[str, list[Exchange]] = field(default_factory=lambda: defaultdict(list))
    _refused: Counter[str] = field(default_factory=Counter)
    """Requests that were refused for a while, and whose repetition is a new call."""

    def of(self, identity: str, start: Callable[[], Answering], *, is_retry: bool) -> Exchange:
        """Return the exchange of a request: an earlier one that it repeats, or a new one.

        Args:
            identity: equal for requests with the same content.
            start: starts a new call.
            is_retry: the client says that it sends the request again.

        Raises:
            CallError: the new call is refused.
        """
        known = [each for each in self._known[identity] if not each.was_refused]
        if is_retry and self._refused[identity]:
            self._refused[identity] -= 1
            known = []
        lost = [each for each in known if each.is_lost]
        if lost or (is_retry and known):
            self.counts["retries"] += 1
            return lost[0] if lost else known[-1]
        try:
            exchange = Exchange(start())
        except CallError:
            self.note_refused(identity)
            raise
        self._known[identity].append(exchange)
        return exchange

    def note_refused(self, identity: str) -> None:
        """Note that a request was refused with status 429, so that clients send it again."""
        self._refused[identity] += 1
