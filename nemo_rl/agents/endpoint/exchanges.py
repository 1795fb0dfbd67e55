"""Keep requests with their answers, so that a request that a client repeats is not sampled again.

A client repeats a request if it was refused for the moment, or if the connection was lost before or after the answer.
The packages openai and anthropic mark repeated requests in a header. Invariant: an answer that no client has received
or waits for is given to the next request with the same content. Other requests get their own answers.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from nemo_rl.agents.endpoint.calls import CallAnswer, CallError

type Answering = "asyncio.Task[list[CallAnswer]]"


class ClientGoneError(Exception):
    """Raised if the client closed the connection before it got an answer."""


@dataclass(eq=False)
class Exchange:
    """A request and its answers."""

    task: Answering
    """Task that makes the answers."""
    num_waiting: int = 0
    """Number of clients that wait for the answers."""
    is_delivered: bool = False
    """Whether a client that waited for the answers has received them."""

    @property
    def is_lost(self) -> bool:
        """True if no client waits for the answers and no client has received them."""
        return self.num_waiting == 0 and not self.is_delivered

    @property
    def was_refused(self) -> bool:
        """True if the request has ended without answers."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    async def answers(self, gone: Awaitable[None]) -> list[CallAnswer]:
        """Wait for the answers. They are made even if the client closes the connection.

        Args:
            gone: awaitable that ends when the client closes the connection.

        Raises:
            ClientGoneError: the client closed the connection before the answers were made.
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
    """Exchanges of a session by the identity of their requests."""

    counts: Counter[str]
    """Counts for metrics. `retries` is the number of requests that were recognised as repetitions."""
    _known: defaultdict[str, list[Exchange]] = field(default_factory=lambda: defaultdict(list))
    _refused: Counter[str] = field(default_factory=Counter)
    """Number of refusals of each request with status 429. The repetition of a refused request is a new call."""

    def of(self, identity: str, start: Callable[[], Answering], *, is_retry: bool) -> Exchange:
        """Return the earlier exchange that a request repeats, or a new exchange.

        Args:
            identity: text that is equal for requests with the same content.
            start: function that starts a new call.
            is_retry: whether the client marks the request as repeated.

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
        """Note that a request was refused with status 429, so that clients will repeat it."""
        self._refused[identity] += 1
