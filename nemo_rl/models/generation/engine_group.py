"""Control several engines: distribute requests, collect results, and replace engines that die.

All of the following runs on the rollout event loop (`experience.event_loop`) unless stated otherwise:

    generate() ─► choose an engine ─► its outbox ─► _flush (next tick, one call per engine) ─► worker.submit
    generate() cancelled (deadline, another sample failed) ─► _flush ─► worker.abort
    _watch task per call ─► a failed call fails the engine's requests
    responses_so_far() ─► worker.responses_so_far of each engine; sampling continues
    _collect task per engine ─► collect of its workers (long poll) ─► resolves the futures of generate()
    engine is silent (hangs) ─► it is killed, then treated as dead
    engine dies ─► _revive: new actors, current weights (`load_weights`), unfinished requests submitted again
    a revival fails ─► the group has ended: waiting and later requests raise the reason
    the training thread finds a dead engine (`with_replacements`) ─► revive_dead, then the call again

An engine has one worker or several (`interfaces.engine_of`). Requests go to the first worker. If any worker dies, the
engine is dead. A thread holds `exclusively` while it replaces engines or moves weights, so a dead engine is replaced
once, even if two threads find it. Invariants: a request is answered exactly once, with the same tokens whichever engine
serves it. A request that no caller waits for is aborted in its engine.
"""

import asyncio
import itertools
import logging
import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, override

from ray.exceptions import RayError

from nemo_rl.distributed.worker_groups import MultiWorkerFuture, RayWorkerGroup
from nemo_rl.distributed.workers.results import WORKER_DEATHS
from nemo_rl.host.processes import PROCESS_STATES
from nemo_rl.models.generation.engine_load import load_metrics
from nemo_rl.models.generation.interfaces import (
    COLLECT_POLL_S,
    GenerationInterface,
    GenerationRequest,
    GenerationResult,
    ResponseSoFar,
    ServedBy,
    engine_of,
)
from nemo_rl.models.generation.members import (
    EngineScaling,
    Member,
    Pending,
    Replacements,
    Silence,
    Wait,
    Waits,
    choose,
    give_up_waits,
    note_as_seen,
    responses_so_far,
    some_answer,
)
from nemo_rl.utils.errors import DeadlineExceededError, GenerationError, WorkerDiedError

logger = logging.getLogger(__name__)

_REVIVAL_END_S = 10.0
"""Seconds for which `shutdown` waits for a replacement that it has interrupted."""

_BUSY_FACTOR = 4
"""Factor that increases the time limit of a silent engine if its process computes."""
_BUSY_SHARE = 0.1
"""Share of a core that a computing process uses at least."""


class EngineGroup(GenerationInterface):
    """Engines with a common `generate`, for one event loop at a time.

    Args:
        workers: Group of all `GenerationWorker`s.
        setup_timeout_s: Time limit for the start of an engine, in seconds.
        max_restarts: Number of dead engines that the run replaces.
        turn_timeout_s: Seconds to wait for another thread in `exclusively`. If None, `setup_timeout_s`.
        workers_per_engine: `EngineSettings.num_workers`, which is also an attribute.
        silence_s: Seconds that an engine with open requests may be silent.
        num_engines_file: File with the number of engines (`members`). If None, all engines run.
    """

    def __init__(
        self,
        workers: RayWorkerGroup,
        setup_timeout_s: float,
        max_restarts: int,
        turn_timeout_s: float | None = None,
        workers_per_engine: int = 1,
        silence_s: float = 300.0,
        num_engines_file: Path | None = None,
    ):
        self.workers = workers
        """The worker group. `algorithms.rollout.refit` also sends weights through it."""
        self.weight_version = 0
        self.load_weights: Callable[[], None] | None = None
        """Function that loads the current weights into new engines. `algorithms.rollout.refit` sets it."""
        self.workers_per_engine = workers_per_engine
        self._setup_timeout_s = setup_timeout_s
        self._turn_timeout_s = turn_timeout_s or setup_timeout_s
        self._replacements = Replacements(workers, setup_timeout_s, max_restarts)
        self._silence_s = silence_s
        self._ids = itertools.count()
        self._flush_is_due = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: Exception | None = None
        """Reason why no more requests are accepted. None while they are accepted."""
        self._watchers: set[asyncio.Task[None]] = set()
        self._replacing = threading.RLock()
        members: dict[int, Member] = {}
        for rank in range(len(workers.workers)):
            index, _ = engine_of(rank, workers_per_engine)
            members.setdefault(index, Member(index)).ranks.append(rank)
        self._members = list(members.values())
        self._scaling: EngineScaling | None = None
        if num_engines_file is not None:
            self._scaling = EngineScaling(num_engines_file, self._members, workers, setup_timeout_s)

    @property
    def _running(self) -> list[Member]:
        """Return the engines that take part in syncs, which are the first of all engines."""
        return [member for member in self._members if not member.is_away]

    @property
    def num_restarts(self) -> int:
        """The number of engines replaced so far."""
        return self._replacements.count

    @property
    def num_workers(self) -> int:
        """The number of workers of the running engines. Their ranks are 0, 1 ..."""
        return sum(len(member.ranks) for member in self._running)

    @property
    def membership(self) -> int:
        """A number that increases when an engine is replaced, joins or leaves."""
        return self.num_restarts + (self._scaling.num_changes if self._scaling else 0)

    def call_all(self, method: str, *args: Any, workers: Sequence[int] | None = None) -> MultiWorkerFuture:
        """Call a method on all workers of the running engines, or only on the given workers."""
        return self.workers.run_all_workers_single_data(method, *args, workers=workers or range(self.num_workers))

    def of_engines[T](self, of_workers: Sequence[T]) -> list[T]:
        """Select the results of each engine's first worker from the results of `call_all`."""
        return [of_workers[member.ranks[0]] for member in self._running]

    def follow_number(self) -> None:
        """Let engines begin to leave or to join, if a file defines the number of engines."""
        if self._scaling is not None:
            self._scaling.follow()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Give all engines new weights in a block (under `exclusively`). Engines leave before it and join after it."""
        if self._scaling is None:
            yield
            return
        self._scaling.change()
        yield
        self._scaling.opened()
        self._flush_from_outside()

    @override
    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self._enter_loop()
        self._refuse_at_the_end()
        loop = asyncio.get_running_loop()
        pending = Pending(request, loop.create_future(), loop.time())
        member = choose(self._members, request.prefix_at, self.weight_version)
        request_id = str(next(self._ids))
        member.unfinished[request_id] = pending
        member.outbox.append((request_id, request))
        self._flush_soon()
        try:
            with member.busy.work():
                result = await pending.future
        except asyncio.CancelledError:
            self._give_up(member, request_id)
            raise
        if result.error is not None:
            raise GenerationError(result.error)
        written_by = result.weight_versions[-1].version if result.weight_versions else self.weight_version
        return replace(result, served_by=ServedBy(member.index, member.num_starts, written_by))

    @override
    async def responses_so_far(self, requests: Sequence[GenerationRequest]) -> list[ResponseSoFar | None]:
        asked = {id(request): request for request in requests}
        of_engines = await asyncio.gather(
            *(
                responses_so_far(m, asked, partial(self._call, m.ranks[0], "responses_so_far"), self._silence_s)
                for m in self._members
            )
        )
        found = {key: response for of_engine in of_engines for key, response in of_engine.items()}
        return [found.get(id(request)) for request in requests]

    def _enter_loop(self) -> None:
        """Serve the caller's event loop. Unfinished requests of an earlier loop are dropped."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._flush_is_due = loop, False
            for member in self._members:
                member.forget_requests()

    def _refuse_at_the_end(self) -> None:
        if self._end is not None:
            raise self._end

    def _give_up(self, member: Member, request_id: str) -> None:
        """Drop a request that no caller waits for. If it was sent, abort it in the engine."""
        if member.unfinished.pop(request_id, None) is None:
            return
        unsent = [item for item in member.outbox if item[0] != request_id]
        if len(unsent) == len(member.outbox):
            member.given_up.append(request_id)
        member.outbox = unsent
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush_from_outside(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, so no caller waits
                self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        """Send the requests of this loop iteration, and make sure that a task collects the results."""
        self._flush_is_due = False
        for member in self._members:
            if self._end is not None:
                self._fail(member, self._end)
            if member.outbox and not member.is_down:
                self._send(member, "submit", member.outbox)
                member.outbox = []
            if member.given_up:
                if not member.is_down:
                    self._send(member, "abort", member.given_up)
                member.given_up = []
            if member.unfinished and (member.collector is None or member.collector.done()):
                waits: Waits = {}
                member.collector = asyncio.get_running_loop().create_task(self._collect(member, waits))
                member.collector.add_done_callback(partial(give_up_waits, waits))

    def _send(self, member: Member, method: str, content: list[Any]) -> None:
        call = self._call(member.ranks[0], method, content)
        watcher = asyncio.get_running_loop().create_task(self._watch(member, call))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch(self, member: Member, call: Any) -> None:
        """Check that an engine accepted a call. `_collect` handles dead engines."""
        try:
            await call
        except WORKER_DEATHS:
            return
        except Exception as failure:  # boundary: any failure of the engine fails its requests
            self._fail(member, failure)

    def _call(self, rank: int, method: str, *args: Any) -> Any:
        return self.workers.run_single_worker_single_data(method, rank, *args)

    async def _collect(self, member: Member, waits: Waits) -> None:
        """Collect results from one engine until no request is pending."""
        # # Results of calls to earlier engines are dropped, because their failures do not concern the pending requests.
        member.polls = {rank: poll for rank, poll in member.polls.items() if poll[0] == member.num_starts}
        while member.unfinished:
            try:
                rank = await self._first_to_answer(member, waits)
                if member.collector is not asyncio.current_task():
                    return  # the group serves another event loop now
                called, _ = member.polls.pop(rank)
                results, load = waits.pop(rank).future.result()
                member.note_load(load)
            except WORKER_DEATHS as death:
                member.polls.clear()
                give_up_waits(waits)
                await self._try_revive(member, called, partial(self._cause_of_death, rank, death))
                continue
            except Silence as silence:
                member.polls.clear()
                give_up_waits(waits)
                await self._try_revive(member, member.num_starts, partial(self._cause_of_silence, member, silence))
                continue
            except Exception as failure:  # boundary: any failure of the engine fails its requests
                self._fail(member, failure)
                return
            now = asyncio.get_running_loop().time()
            for request_id, result in results:
                member.answer(request_id, result, now)

    async def _first_to_answer(self, member: Member, waits: Waits) -> int:
        """Return the worker of an engine whose call of `collect` ends first, with results or because it died."""
        clock = asyncio.get_running_loop().time
        for rank in member.ranks:
            if rank not in member.polls:
                poll_s = min(COLLECT_POLL_S, self._silence_s / 4)
                member.polls[rank] = (member.num_starts, self._call(rank, "collect", poll_s))
            if rank not in waits:
                waits[rank] = Wait(asyncio.ensure_future(member.polls[rank][1]), clock())
                waits[rank].future.add_done_callback(note_as_seen)
        quietest = min(waits, key=lambda rank: waits[rank].since)
        while not await some_answer(waits, waits[quietest].since + self._silence_s - clock()):
            silent_s = clock() - waits[quietest].since
            if silent_s > _BUSY_FACTOR * self._silence_s or not await self._is_busy(member, waits):
                raise Silence(quietest, silent_s)
        return next(rank for rank, wait in waits.items() if wait.future.done())

    async def _is_busy(self, member: Member, waits: Waits) -> bool:
        """Return whether a silent engine computes, or answers within a tenth of `silence_s`."""
        before = await asyncio.to_thread(self.workers.activity, member.ranks)
        window_s = self._silence_s / 10
        if await some_answer(waits, window_s):
            return True
        after = await asyncio.to_thread(self.workers.activity, member.ranks)
        used_s = sum(seconds for _, seconds in after) - sum(seconds for _, seconds in before)
        return used_s > _BUSY_SHARE * window_s and all(state not in "Tt" for state, _ in after)

    async def _try_revive(self, member: Member, called: int, cause: Callable[[], str]) -> None:
        member.is_down = True
        try:
            await asyncio.to_thread(self._revive, member, called, cause)
            member.is_down, member.outbox = False, []
            for pending in member.unfinished.values():
                pending.since = asyncio.get_running_loop().time()
            self._send(member, "submit", [(id_, p.request) for id_, p in member.unfinished.items()])
        except Exception as failure:  # boundary: if an engine cannot be restarted, the group ends
            self._end = self._end or failure
            self._flush()

    def _cause_of_death(self, rank: int, death: RayError) -> str:
        return str(self.workers.explain_failure(death, rank, "generation"))

    def _cause_of_silence(self, member: Member, silence: Silence) -> str:
        lengths = [len(pending.request.prompt_token_ids) for pending in member.unfinished.values()]
        open_ones = (
            f"{len(lengths)} requests open (prompts of {min(lengths)} to {max(lengths)} tokens)" if lengths else ""
        )
        states = ", ".join(PROCESS_STATES.get(state, state) for state, _ in self.workers.activity(member.ranks))
        reason = (
            f"Worker {self.workers.slot(silence.rank)} has given no sign of life for {silence.seconds:.0f} s "
            f"(cluster.timeouts.engine_silence_s={self._silence_s:g}), its process is {states}; "
            f"{open_ones or 'no request is open'}."
        )
        logger.warning("Generation engine %d hangs. %s\n%s", member.index, reason, self.workers.stacks(member.ranks))
        return reason

    def _revive(self, member: Member, called: int, cause: Callable[[], str]) -> None:
        """Replace the engine with `num_starts` equal to `called`, unless another thread has already replaced it."""
        with self.exclusively():
            self._refuse_at_the_end()
            if member.num_starts == called:
                self._replace(member, cause())
                if self.load_weights is not None:
                    self.load_weights()
        logger.warning("Generation engine %d is back at version %d.", member.index, self.weight_version)

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Prevent other threads from replacing engines and sending weights. The same thread may enter again.

        Raises:
            DeadlineExceededError: another thread did not finish in `turn_timeout_s`.
        """
        if not self._replacing.acquire(timeout=self._turn_timeout_s):
            raise DeadlineExceededError(
                f"Another thread replaced engines or moved weights for more than {self._turn_timeout_s:g} s "
                "(cluster.timeouts: train_s + setup_s + weight_sync_s)."
            )
        try:
            yield
        finally:
            self._replacing.release()

    def with_replacements[T](self, work: Callable[[], T]) -> T:
        """Call a function that needs every engine. Replace engines that turn out to be dead, and call it again.

        If the function misses a deadline, engines whose processes are stopped (SIGSTOP) are replaced in the same way. A
        new engine is awake and has no weights yet.

        Raises:
            WorkerDiedError: The run's restarts are used up, or a process other than an engine died.
            DeadlineExceededError: The function missed a deadline, and no engine's process is stopped.
        """
        with self.exclusively():
            while True:
                try:
                    return work()
                except WorkerDiedError:
                    if self.revive_dead() == 0:
                        raise
                except DeadlineExceededError:
                    if self._replace_stopped() == 0:
                        raise

    def revive_dead(self) -> int:
        """Replace engines that died while no request was in flight, and return their number.

        Raises:
            WorkerDiedError: the run's restarts are used up.
        """
        num_revived = 0
        for member in self._running:
            calls = MultiWorkerFuture([self._call(rank, "ready") for rank in member.ranks], called_workers=member.ranks)
            try:
                # # All workers are called at once, because a surviving rank of a dead engine may wait for the dead rank
                # forever.
                self.workers.get_all_worker_results(calls, self._setup_timeout_s, "engine check")
            except WorkerDiedError as death:
                self._replace(member, str(death))
                num_revived += 1
        return num_revived

    def replace_engines(self, ranks: Collection[int], reason: str) -> None:
        """Replace the engines of some workers, and load the current weights. The caller must hold `exclusively`.

        Raises:
            WorkerDiedError: the run's restarts are used up.
        """
        for member in self._running:
            if not set(ranks).isdisjoint(member.ranks):
                self._replace(member, reason)
        if self.load_weights is not None:
            self.load_weights()

    def _replace_stopped(self) -> int:
        """Replace engines whose processes are stopped, and return their number."""
        stopped = [m for m in self._running if any(state == "T" for state, _ in self.workers.activity(m.ranks))]
        for member in stopped:
            self._replace(member, f"A process of {self.workers.slot(member.ranks[0])} is stopped (SIGSTOP).")
        return len(stopped)

    def reopen(self) -> None:
        """Accept requests again, and replace dead engines, after a loss of policy ranks left an engine without weights.

        Raises:
            WorkerDiedError: the run's restarts are used up, or the engines have been shut down.
        """
        with self.exclusively():
            self.revive_dead()
            for member in self._running:
                member.is_down = False
            self._end = None

    def _replace(self, member: Member, reason: str) -> None:
        self._replacements.replace(member, reason, self._refuse_at_the_end)

    def _fail(self, member: Member, failure: Exception) -> None:
        """Fail all requests that are pending at an engine."""
        if isinstance(failure, RayError):
            failure = self.workers.explain_failure(failure, member.ranks[0], "generation")
        for pending in member.unfinished.values():
            if not pending.future.done():
                pending.future.set_exception(failure)
        member.unfinished.clear()
        member.outbox, member.given_up = [], []

    @override
    def busy_seconds(self) -> list[float]:
        return [math.nan if member.is_away else member.busy.seconds for member in self._members]

    @override
    def open_requests(self) -> list[int]:
        return [len(member.unfinished) for member in self._members]

    @override
    def load_metrics(self) -> dict[str, float]:
        loads = [member.load for member in self._members if member.load is not None]
        for member in self._members:
            member.load = None
        return load_metrics(loads)

    def describe_open(self) -> str:
        """Describe the engines with open requests, including the stacks of their workers."""
        lines = []
        for member in self._members:
            if member.unfinished:
                names = ", ".join(str(self.workers.slot(rank)) for rank in member.ranks)
                state = " (being replaced)" if member.is_down else f"\n{self.workers.stacks(member.ranks)}"
                lines.append(
                    f"Generation engine {member.index} has {len(member.unfinished)} requests open: {names}{state}"
                )
        return "\n".join(lines)

    def shutdown(self) -> None:
        """Kill the engine actors and fail all pending requests.

        A running replacement of an engine is interrupted, with a wait of at most 10 s for its end.
        """
        self._end = self._end or WorkerDiedError("The generation engines have been shut down.")
        self._flush_from_outside()
        self.workers.shutdown(force=True)
        if self._replacing.acquire(timeout=_REVIVAL_END_S):
            self._replacing.release()
