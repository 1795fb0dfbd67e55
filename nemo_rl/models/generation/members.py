"""The engines of a group as the controller sees them, and which of them gets a request.

A request goes to the engine that holds its prefix, or else to the one that is expected to answer it first: the one with
the fewest open requests, where those of a slow engine count more. Invariant: the choice changes no answer, because each
request carries its seed.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.distributed.workers.results import WORKER_DEATHS
from nemo_rl.models.generation.interfaces import (
    GenerationRequest,
    GenerationResult,
    ResponseSoFar,
    ServedBy,
)
from nemo_rl.models.generation.reports.load import EngineLoad
from nemo_rl.utils.timer import BusyClock

_MORE_FOR_PREFIX = 8
"""Open requests that an engine chosen for its prefix cache may have more than the least busy engine."""
_SLOW = 1.5
"""How many times longer than the fastest engine one must take for a token to get fewer requests. Smaller differences
are noise, and the distribution of requests stays the same from run to run."""
_ENOUGH_TOKENS = 256
"""Tokens of answers from which on an engine's speed counts."""
_ARRIVAL_S = 10.0
"""Seconds to wait for a response that the engine has finished already."""
_KEPT = 0.98
"""Share of earlier answers in an engine's speed that remains with each answer."""


@dataclass
class Pending:
    """A request without an answer yet; `since` is the loop's time at which it was sent."""

    request: GenerationRequest
    future: asyncio.Future[GenerationResult]
    since: float = 0.0


@dataclass
class Speed:
    """Seconds that an engine takes for a token of an answer, with waits in the engine; recent answers count more."""

    seconds: float = 0.0
    """Seconds of answers."""
    tokens: float = 0.0
    """Tokens of the same answers."""

    def note(self, seconds: float, tokens: int) -> None:
        """Add an answer."""
        self.seconds, self.tokens = self.seconds * _KEPT + seconds, self.tokens * _KEPT + tokens

    @property
    def seconds_per_token(self) -> float | None:
        """The mean; None before there are enough answers."""
        return self.seconds / self.tokens if self.tokens >= _ENOUGH_TOKENS else None


@dataclass
class Member:
    """One engine and its pending requests; while it is down, they are kept until it is back."""

    index: int
    """Its position among the engines."""
    ranks: list[int] = field(default_factory=list)
    """Its workers in the group; the first one receives requests."""
    num_starts: int = 1
    """Engines started for this member; it shows whether a dead engine was replaced already."""
    is_down: bool = False
    """It is being replaced, or has no weights yet."""
    is_leaving: bool = False
    """It answers its requests and gets no more."""
    is_away: bool = False
    """It has no processes; see `scaling`."""
    unfinished: dict[str, Pending] = field(default_factory=dict)
    """Requests without an answer."""
    outbox: list[tuple[str, GenerationRequest]] = field(default_factory=list)
    """Requests that are sent in the next iteration of the loop."""
    given_up: list[str] = field(default_factory=list)
    """Requests to abort."""
    polls: dict[int, tuple[int, Any]] = field(default_factory=dict)
    """Running calls of `collect` by rank, each with the `num_starts` of the called engine."""
    collector: asyncio.Task[None] | None = None
    """The task that takes its results."""
    busy: BusyClock = field(default_factory=BusyClock)
    """Measures the time with pending requests."""
    load: EngineLoad | None = None
    """Load that it reported since the group was asked for it."""
    speed: Speed = field(default_factory=Speed)
    """How fast it answers."""

    def forget_requests(self) -> None:
        """Drop all pending requests, for which no caller waits, and abort those that were sent."""
        unsent = {request_id for request_id, _ in self.outbox}
        self.given_up += [request_id for request_id in self.unfinished if request_id not in unsent]
        self.unfinished, self.outbox, self.collector, self.is_down = {}, [], None, False

    def note_load(self, load: EngineLoad | None) -> None:
        """Add a report of the engine."""
        if load is not None:
            self.load = load if self.load is None else self.load.plus(load)

    def answer(self, request_id: str, result: GenerationResult, now: float) -> None:
        """Give a result to the caller that waits for it, if there is one."""
        pending = self.unfinished.pop(request_id, None)
        if pending is None or pending.future.done():
            return
        if len(result.token_ids):
            self.speed.note(now - pending.since, len(result.token_ids))
        pending.future.set_result(result)


async def responses_so_far(
    member: Member, requests: Mapping[int, GenerationRequest], ask: Callable[[list[str]], Any], limit_s: float
) -> dict[int, ResponseSoFar | None]:
    """Return the tokens that an engine has sampled so far for some requests.

    An engine that is dead, being replaced or silent counts as one that has sampled none: it will get the requests
    again. A response that is on its way is waited for.

    Args:
        member: the engine.
        requests: by the `id()` of the object; those of other engines are left out.
        ask: calls `responses_so_far` of its first worker.
        limit_s: seconds to wait for the engine.

    Returns:
        By `id()` of the request; None for one that has been answered meanwhile.
    """
    mine = {key: pending for key, pending in member.unfinished.items() if id(pending.request) in requests}
    unsent = {key for key, _ in member.outbox}
    sent = [] if member.is_down else [key for key in mine if key not in unsent]
    found: dict[str, ResponseSoFar] = {}
    if sent:
        with suppress(*WORKER_DEATHS, TimeoutError):
            found = await asyncio.wait_for(ask(sent), limit_s)
            arriving = [mine[key].future for key in sent if key not in found and not mine[key].future.done()]
            if arriving:
                await asyncio.wait(arriving, timeout=_ARRIVAL_S)
    return {
        id(pending.request): None if pending.future.done() else found.get(key, ResponseSoFar.nothing())
        for key, pending in mine.items()
    }


def choose(members: Sequence[Member], prefix_at: ServedBy | None, weight_version: int) -> Member:
    """Return the engine for a request.

    The engine that wrote the previous turn is taken while it runs, was not replaced, has the weights that it wrote
    with (new weights void its cache), and has at most `_MORE_FOR_PREFIX` open requests more than the least busy
    engine: reading a prefix again costs less than a long wait, and no engine is left idle.

    Args:
        members: the engines.
        prefix_at: the engine that wrote the previous turn.
        weight_version: of the engines' weights.
    """
    members = [member for member in members if not (member.is_leaving or member.is_away)]
    known = [member.speed.seconds_per_token for member in members]
    fastest = min((seconds for seconds in known if seconds is not None), default=0.0)

    def wait(member: Member) -> float:
        """Expected wait in units of the fastest engine's time for an answer."""
        factor = (member.speed.seconds_per_token or fastest) / fastest if fastest else 1.0
        return (len(member.unfinished) + 1) * (factor if factor >= _SLOW else 1.0)

    best = min(members, key=lambda member: (member.is_down, wait(member), member.index))
    if prefix_at is None or prefix_at.weight_version != weight_version:
        return best
    holder = next((member for member in members if member.index == prefix_at.engine), None)
    if holder is None or holder.is_down or holder.num_starts != prefix_at.num_starts:
        return best
    return holder if len(holder.unfinished) <= len(best.unfinished) + _MORE_FOR_PREFIX else best
