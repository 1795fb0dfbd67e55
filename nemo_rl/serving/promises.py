"""Hold the results of requests until clients ask for them.

    submit ─► Promise ─► retrieve_future waits for it, at most `poll_hold_s` seconds ─► RequestOutcome

Invariant: a result can be asked for again for `keep_s` seconds after it was delivered, because answers get lost.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

type Category = Literal["user", "server"]

UNASKED_S = 86400.0
"""Time in seconds after which a result is removed for which no client has asked."""
_PROTO = b"P"
_JSON = b"J"
_FAILED = b"F"


@dataclass(frozen=True)
class RequestOutcome:
    """Result of a request, or its error."""

    content: bytes
    """Body of the answer."""
    is_proto: bool = False
    """Whether the content is a protobuf message. If not, it is JSON."""
    has_failed: bool = False
    """Whether the request has failed."""

    @classmethod
    def of_json(cls, **fields: object) -> "RequestOutcome":
        """Return a result in JSON."""
        return cls(json.dumps(fields).encode())

    @classmethod
    def failed(cls, message: str, category: Category) -> "RequestOutcome":
        """Return an error."""
        return cls(json.dumps({"error": message, "category": category}).encode(), has_failed=True)

    def packed(self) -> bytes:
        """Return the bytes for a file."""
        kind = _FAILED if self.has_failed else _PROTO if self.is_proto else _JSON
        return kind + self.content

    @classmethod
    def unpacked(cls, stored: bytes) -> "RequestOutcome":
        """Return what `packed` has stored."""
        return cls(stored[1:], stored[:1] == _PROTO, stored[:1] == _FAILED)


@dataclass(eq=False)
class Promise:
    """Result that is there, or will be."""

    id: str
    """Id of the request."""
    digest: str
    """Hash of the request."""
    outcome: RequestOutcome | None = None
    """The result, or None if it is not there yet."""
    made_at: float = field(default_factory=time.monotonic)
    """Time of the result, or of the request without one, in seconds of the monotonic clock."""
    delivered_at: float | None = None
    """Time at which the result was first sent to a client, or None if it was not."""
    _is_there: asyncio.Event = field(default_factory=asyncio.Event)

    def resolve(self, outcome: RequestOutcome) -> None:
        """Set the result. Only the first one counts."""
        if self.outcome is None:
            self.outcome, self.made_at = outcome, time.monotonic()
            self._is_there.set()

    async def wait(self, seconds: float) -> RequestOutcome | None:
        """Return the result, or None if it is not there in time or the process ends."""
        if self.outcome is None:
            try:
                async with asyncio.timeout(seconds):
                    await self._is_there.wait()
            except TimeoutError:
                return None
        return self.outcome

    def give_up(self) -> None:
        """Let all waits end without a result, now and later."""
        self._is_there.set()

    def note_delivery(self) -> None:
        """Note that the result is sent to a client."""
        if self.delivered_at is None:
            self.delivered_at = time.monotonic()

    def is_over(self, keep_s: float) -> bool:
        """Return whether the result may be removed."""
        if self.outcome is None:
            return False
        now = time.monotonic()
        return now - self.made_at > UNASKED_S if self.delivered_at is None else now - self.delivered_at > keep_s


@dataclass
class PromiseBook:
    """Promises by the ids of their requests."""

    keep_s: float
    """Time in seconds for which a result is kept after it was delivered."""
    _promises: dict[str, Promise] = field(default_factory=dict)

    def get(self, request_id: str) -> Promise | None:
        """Return a promise, or None if there is no such one."""
        return self._promises.get(request_id)

    def add(self, promise: Promise) -> Promise:
        """Keep a promise."""
        self._promises[promise.id] = promise
        return promise

    def unresolved(self, wanted: Callable[[Promise], bool]) -> Iterator[Promise]:
        """Yield the promises without results that a function accepts."""
        yield from (each for each in self._promises.values() if each.outcome is None and wanted(each))

    def give_up(self) -> None:
        """Let clients stop waiting, because the process ends. They ask the next one."""
        for promise in self._promises.values():
            promise.give_up()

    def remove_over(self) -> list[Promise]:
        """Remove and return the promises whose time is over."""
        over = [promise for promise in self._promises.values() if promise.is_over(self.keep_s)]
        for promise in over:
            del self._promises[promise.id]
        return over
