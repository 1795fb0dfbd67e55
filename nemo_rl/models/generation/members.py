"""Choose engines for requests, and replace, add or remove engines of a group, in the controller.

A request goes to the engine that has its prefix in the cache, or else to the engine that is expected to answer first.
This is the engine with the fewest open requests, where requests of a slow engine count more. Invariant: the choice does
not change an answer, because each request has its own seed.

The file `policy.generation.num_engines_file` holds the number of engines that should run.

    follow()   before each sync: read the file
                 smaller number: the engines with the highest indices get no new requests, and finish those they have
                 larger number: the missing engines with the lowest indices are started in the background
    change()   during the sync: stop leaving engines that have no request left, and include engines that have started
    opened()   after the sync: send requests to the new engines, which now have the current weights

The Ray bundles of a stopped engine stay reserved for it. Invariants: the running engines are always those with the
lowest indices, so their ranks have no gap. An engine gets no request before it has weights, and no engine is stopped
while it has a request.

`Wait` represents a pending call to an engine's worker. Cancelling it does not cancel the call.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from nemo_rl.distributed.worker_groups import RayWorkerGroup
from nemo_rl.distributed.workers.results import WORKER_DEATHS
from nemo_rl.files.regular_file import read_text
from nemo_rl.host.boundary import in_background
from nemo_rl.models.generation.engine_load import EngineLoad
from nemo_rl.models.generation.interfaces import (
    GenerationRequest,
    GenerationResult,
    ResponseSoFar,
    ServedBy,
)
from nemo_rl.utils.errors import NodeLostError, ResourceInsufficientError, WorkerDiedError
from nemo_rl.utils.timer import BusyClock

_MORE_FOR_PREFIX = 8
"""Number by which the open requests of the engine with the prefix may exceed those of the least busy engine."""
_SLOW = 1.5
"""Factor by which an engine must be slower than the fastest engine to get fewer requests. Smaller differences are
ignored as noise, so that the distribution of requests does not vary between runs."""
_ENOUGH_TOKENS = 256
"""Number of answered tokens above which an engine's measured speed is used."""
_ARRIVAL_S = 10.0
"""Seconds to wait for a response that the engine has already finished."""
_KEPT = 0.98
"""Factor of earlier answers' weight when a new answer is added."""


@dataclass
class Pending:
    """A request without an answer. `since` is the loop's time when the request was sent."""

    request: GenerationRequest
    future: asyncio.Future[GenerationResult]
    since: float = 0.0


@dataclass
class Speed:
    """Seconds per token of an engine's answers, including waiting. Recent answers have more weight."""

    seconds: float = 0.0
    """Weighted sum of the durations of answers in seconds."""
    tokens: float = 0.0
    """Weighted sum of the tokens of the same answers."""

    def note(self, seconds: float, tokens: int) -> None:
        """Add an answer."""
        self.seconds, self.tokens = self.seconds * _KEPT + seconds, self.tokens * _KEPT + tokens

    @property
    def seconds_per_token(self) -> float | None:
        """Return the mean seconds per token, or None before there are enough answers."""
        return self.seconds / self.tokens if self.tokens >= _ENOUGH_TOKENS else None


@dataclass
class Member:
    """One engine with its pending requests, which are kept while the engine is down."""

    index: int
    """Position of the engine among all engines."""
    ranks: list[int] = field(default_factory=list)
    """Ranks of the engine's workers in the group. The first worker receives requests."""
    num_starts: int = 1
    """Number of engines started for this member. It shows whether a dead engine has already been replaced."""
    is_down: bool = False
    """Whether the engine is being replaced, or has no weights yet."""
    is_leaving: bool = False
    """Whether the engine is leaving: it answers its requests and gets no more."""
    is_away: bool = False
    """Whether the engine has no processes (`EngineScaling`)."""
    unfinished: dict[str, Pending] = field(default_factory=dict)
    """Requests without an answer."""
    outbox: list[tuple[str, GenerationRequest]] = field(default_factory=list)
    """Requests to send in the next iteration of the loop."""
    given_up: list[str] = field(default_factory=list)
    """Requests to abort."""
    polls: dict[int, tuple[int, Any]] = field(default_factory=dict)
    """Running calls of `collect` by rank, with the `num_starts` of the called engine."""
    collector: asyncio.Task[None] | None = None
    """Task that collects the engine's results."""
    busy: BusyClock = field(default_factory=BusyClock)
    """Clock of the time with pending requests."""
    load: EngineLoad | None = None
    """Load that the engine has reported since the load metrics were last read."""
    speed: Speed = field(default_factory=Speed)
    """Speed of the engine's answers."""

    def forget_requests(self) -> None:
        """Drop all pending requests, because no caller waits for them. Sent requests are aborted."""
        unsent = {request_id for request_id, _ in self.outbox}
        self.given_up += [request_id for request_id in self.unfinished if request_id not in unsent]
        self.unfinished, self.outbox, self.collector, self.is_down = {}, [], None, False

    def note_load(self, load: EngineLoad | None) -> None:
        """Add a load report of the engine."""
        if load is not None:
            self.load = load if self.load is None else self.load.plus(load)

    def answer(self, request_id: str, result: GenerationResult, now: float) -> None:
        """Give a result to the waiting caller, if there is one."""
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

    If an engine is dead, being replaced or silent, no tokens are returned, because its requests will be submitted
    again. The call waits for responses that the engine has already finished.

    Args:
        requests: Requests by the `id()` of the object. Requests of other engines are left out.
        ask: Function that calls `responses_so_far` of the engine's first worker.
        limit_s: Time limit for the engine's answer, in seconds.

    Returns:
        Responses so far by the `id()` of the request, with None for a request that has been answered in the meantime.
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

    The engine that wrote the previous turn is chosen under four conditions. It runs, it was not replaced, it still has
    the same weights (new weights make its cache useless), and it has at most `_MORE_FOR_PREFIX` open requests more than
    the least busy engine. Otherwise another engine is faster, although it has to read the prefix again.

    Args:
        prefix_at: The engine that wrote the previous turn.
    """
    members = [member for member in members if not (member.is_leaving or member.is_away)]
    known = [member.speed.seconds_per_token for member in members]
    fastest = min((seconds for seconds in known if seconds is not None), default=0.0)

    def wait(member: Member) -> float:
        """Return the expected wait, in units of the fastest engine's time for an answer."""
        factor = (member.speed.seconds_per_token or fastest) / fastest if fastest else 1.0
        return (len(member.unfinished) + 1) * (factor if factor >= _SLOW else 1.0)

    best = min(members, key=lambda member: (member.is_down, wait(member), member.index))
    if prefix_at is None or prefix_at.weight_version != weight_version:
        return best
    holder = next((member for member in members if member.index == prefix_at.engine), None)
    if holder is None or holder.is_down or holder.num_starts != prefix_at.num_starts:
        return best
    return holder if len(holder.unfinished) <= len(best.unfinished) + _MORE_FOR_PREFIX else best


logger = logging.getLogger(__name__)

_MOST_STARTS = 3
"""Number of attempts to start an engine that dies before it is ready."""


class Replacements:
    """Replace engines, and count the replacements.

    Args:
        workers: The workers of all engines.
        setup_timeout_s: Time limit for the start of an engine, in seconds.
        most: Number of engines that may be replaced in the run (`cluster.max_actor_restarts`).
    """

    def __init__(self, workers: RayWorkerGroup, setup_timeout_s: float, most: int) -> None:
        self.count = 0
        """Number of engines replaced so far."""
        self._workers = workers
        self._setup_timeout_s = setup_timeout_s
        self._most = most

    def replace(self, member: Member, reason: str, check: Callable[[], None]) -> None:
        """Start a new engine for a member. If the engine dies during its start, repeat this.

        Args:
            member: The dead engine.
            reason: Description of the failure.
            check: Function that is called before a repetition. It raises an error if the engines are no longer needed.

        Raises:
            WorkerDiedError: The run's restarts are used up, or the engine died at each of `_MOST_STARTS` starts.
            ResourceInsufficientError: The engine's node was lost, and no other node has the resources.
        """
        for num_left in reversed(range(_MOST_STARTS)):
            self._note(member, reason)
            try:
                self._workers.restart_workers(member.ranks, self._setup_timeout_s)
                break
            except ResourceInsufficientError as shortage:
                raise ResourceInsufficientError(f"{reason} {shortage}") from shortage
            except WorkerDiedError as death:
                if num_left == 0 or isinstance(death, NodeLostError):
                    raise
                reason = str(death)
                check()
        member.num_starts += 1
        member.speed = Speed()

    def _note(self, member: Member, reason: str) -> None:
        self.count += 1
        if self.count > self._most:
            raise WorkerDiedError(
                f"Generation engine {member.index} died and cluster.max_actor_restarts={self._most} restarts are used "
                f"up. {reason}"
            )
        logger.warning(
            "Generation engine %d died; restarting it (%d of %d) and re-issuing %d requests. %s",
            member.index,
            self.count,
            self._most,
            len(member.unfinished),
            reason.splitlines()[0],
        )


class EngineScaling:
    """Keep the number of engines equal to the number in a file.

    Args:
        file: File with one number. If there is no file, all engines run.
        members: All engines of the run. At first, all of them run.
        workers: Processes of the engines.
        setup_timeout_s: Time limit for the start of new engines, in seconds.
    """

    def __init__(self, file: Path, members: Sequence[Member], workers: RayWorkerGroup, setup_timeout_s: float):
        self.num_changes = 0
        """Number of times that an engine left or joined."""
        self._file = file
        self._members = members
        self._workers = workers
        self._setup_timeout_s = setup_timeout_s
        self._text = ""
        self._wanted = len(members)
        self._may_start = True
        self._started: list[Member] = []
        self._start: Future[None] | None = None
        self._was_leaving: set[int] = set()
        self._joined: list[Member] = []

    def follow(self) -> None:
        """Read the file, and let engines begin to leave or to join."""
        self._read()
        self._was_leaving = {member.index for member in self._members if member.is_leaving}
        for member in self._members:
            member.is_leaving = not member.is_away and member.index >= self._wanted
        missing = [member for member in self._members if member.is_away and member.index < self._wanted]
        if missing and self._start is None and self._may_start:
            ranks = [rank for member in missing for rank in member.ranks]
            logger.info("Starting generation engines %s.", [member.index for member in missing])
            build = partial(self._workers.restart_workers, ranks, self._setup_timeout_s)
            self._started, self._start = missing, in_background(build, "engines that join")

    def change(self) -> None:
        """End engines that have left, and include started engines, while no other thread uses the engines."""
        for member in reversed(self._members):
            if member.is_away:
                continue
            # # An engine that has just started to leave may be receiving its last request in another thread.
            if not member.is_leaving or member.unfinished or member.index not in self._was_leaving:
                break
            self._workers.end_workers(member.ranks)
            member.is_away, member.is_leaving = True, False
            self._changed(f"Generation engine {member.index} has left")
        if self._start is not None and self._start.done():
            self._join(self._start)

    def _join(self, start: "Future[None]") -> None:
        joining, self._started, self._start = self._started, [], None
        failure = start.exception()
        if failure is not None:
            self._may_start = False  # until the file changes
            logger.warning("Generation engines could not join: %s", failure)
            return
        for member in joining:
            member.is_away, member.is_down = False, True
            member.num_starts += 1
            member.speed = Speed()
            self._joined.append(member)
            self._changed(f"Generation engine {member.index} joins")

    def opened(self) -> None:
        """Send requests to the engines that joined. They have the current weights now."""
        for member in self._joined:
            member.is_down = False
        self._joined.clear()

    def _changed(self, event: str) -> None:
        self.num_changes += 1
        count = sum(not member.is_away for member in self._members)
        logger.info("%s; engines: %d of %d.", event, count, len(self._members))

    def _read(self) -> None:
        """Read the wanted number of engines. An invalid number is reported once and ignored."""
        try:
            text = read_text(self._file).strip()
        except FileNotFoundError:
            text = str(len(self._members))
        if not text or text == self._text:
            return  # an empty file is being written
        self._text, self._may_start = text, True
        if text.isdecimal() and 1 <= int(text) <= len(self._members):
            self._wanted = int(text)
        else:
            logger.warning(
                "%s (policy.generation.num_engines_file) holds %r; write one number from 1 to %d, the engines that the "
                "run has room for. It keeps %d.",
                self._file,
                text[:50],
                len(self._members),
                self._wanted,
            )


@dataclass(frozen=True)
class Wait:
    """A pending call of `collect`, with its start by the loop's clock."""

    future: asyncio.Future[Any]
    since: float


type Waits = dict[int, Wait]
"""Waits by rank."""


class Silence(Exception):  # noqa: N818
    """Error that a worker of an engine has not answered for too long."""

    def __init__(self, rank: int, seconds: float) -> None:
        super().__init__(f"rank {rank} was silent for {seconds:g} s")
        self.rank, self.seconds = rank, seconds


def note_as_seen(wait: asyncio.Future[Any]) -> None:
    """Read the exception of a failed call, so that asyncio does not report it as never retrieved."""
    if not wait.cancelled():
        wait.exception()


def give_up_waits(waits: Waits, _: object = None) -> None:
    """Cancel waits without cancelling their calls. asyncio would report pending waits when the loop closes."""
    for wait in waits.values():
        wait.future.cancel()
    waits.clear()


async def some_answer(waits: Waits, timeout_s: float) -> bool:
    """Wait at most `timeout_s`, and return whether one of the calls has ended."""
    futures = [wait.future for wait in waits.values()]
    done, _ = await asyncio.wait(futures, timeout=max(timeout_s, 0.0), return_when=asyncio.FIRST_COMPLETED)
    return bool(done)
