"""Controller side of several engines: spreads requests, gathers results, replaces engines that die.

Map (everything below runs on the rollout event loop, see `experience.event_loop`):

    generate() ─► least busy engine's outbox ─► _flush (next tick, one call per engine) ─► worker.submit
    _watch task per submission ─► a submission that fails ends the engine's requests
    _collect task per engine ─► worker.collect (long poll) ─► resolves the futures of generate()
    engine dies ─► _revive: new actor, current weights (`bring_up`), unfinished requests submitted again
    the training thread meets a dead engine (`with_replacements`) ─► revive_dead, then the call again

Both threads hold `exclusively` while they replace engines or move weights, so that an engine that both of them meet
dead is replaced once. Invariant: a request is answered exactly once, and with the same tokens whichever engine serves
it.
"""

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError, RayError

from nemo_rl.distributed.worker_groups import RayWorkerGroup
from nemo_rl.models.generation.interfaces import (
    GenerationInterface,
    GenerationRequest,
    GenerationResult,
)
from nemo_rl.utils.errors import DeadlineExceededError, GenerationError, WorkerDiedError

logger = logging.getLogger(__name__)


@dataclass
class _Pending:
    request: GenerationRequest
    future: asyncio.Future[GenerationResult]


@dataclass
class _Slot:
    """The requests pending at one engine; a slot that is down keeps its requests until its engine is back.

    `num_starts` counts the engines that this slot has had; it tells whether an engine that died was replaced already.
    """

    index: int
    num_starts: int = 1
    is_down: bool = False
    unfinished: dict[str, _Pending] = field(default_factory=dict)
    outbox: list[tuple[str, GenerationRequest]] = field(default_factory=list)
    collector: asyncio.Task[None] | None = None


class EngineGroup(GenerationInterface):
    """Engines behind one `generate`.

    Args:
        workers: one `GenerationWorker` per engine, independent of each other.
        setup_timeout_s: limit for building an engine.
        max_restarts: how many engine deaths the run survives.

    Attributes:
        workers: the worker group; `algorithms.rollout.refit` moves weights through it.
        num_restarts: engines replaced so far.
        bring_up: gives new engines the current weights; set by `algorithms.rollout.refit`.
    """

    def __init__(self, workers: RayWorkerGroup, setup_timeout_s: float, max_restarts: int):
        self.workers = workers
        self.weight_version = 0
        self.num_restarts = 0
        self.bring_up: Callable[[], None] | None = None
        self._setup_timeout_s = setup_timeout_s
        self._max_restarts = max_restarts
        self._ids = itertools.count()
        self._flush_is_due = False
        self._watchers: set[asyncio.Task[None]] = set()
        self._replacing = threading.RLock()
        self._slots = [_Slot(index) for index in range(len(workers.workers))]

    @property
    def num_engines(self) -> int:
        """How many engines run."""
        return len(self._slots)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See `GenerationInterface.generate`."""
        loop = asyncio.get_running_loop()
        pending = _Pending(request, loop.create_future())
        slot = min(self._slots, key=lambda s: (s.is_down, len(s.unfinished), s.index))
        request_id = str(next(self._ids))
        slot.unfinished[request_id] = pending
        slot.outbox.append((request_id, request))
        if not self._flush_is_due:
            self._flush_is_due = True
            loop.call_soon(self._flush)
        result = await pending.future
        if result.error is not None:
            raise GenerationError(result.error)
        return result

    def _flush(self) -> None:
        """Send what gathered in this tick and make sure that a task collects the answers."""
        self._flush_is_due = False
        for slot in self._slots:
            if slot.outbox and not slot.is_down:
                self._submit(slot, slot.outbox)
                slot.outbox = []
            if slot.unfinished and (slot.collector is None or slot.collector.done()):
                slot.collector = asyncio.get_running_loop().create_task(self._collect(slot))

    def _submit(self, slot: _Slot, requests: list[tuple[str, GenerationRequest]]) -> None:
        watcher = asyncio.get_running_loop().create_task(self._watch(slot, self._call(slot, "submit", requests)))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch(self, slot: _Slot, submission: Any) -> None:
        """See that an engine took its requests; `_collect` handles deaths."""
        try:
            await submission
        except RayActorError:
            return
        except Exception as failure:  # boundary: whatever broke the engine ends its requests
            self._fail(slot, failure)

    def _call(self, slot: _Slot, method: str, *args: Any) -> Any:
        return self.workers.run_single_worker_single_data(method, slot.index, *args)

    async def _collect(self, slot: _Slot) -> None:
        """Take results from one engine until none is pending."""
        while slot.unfinished:
            called = slot.num_starts
            try:
                results = await self._call(slot, "collect")
            except RayActorError as death:
                await self._try_revive(slot, called, death)
                continue
            except Exception as failure:  # boundary: whatever broke the engine ends its requests
                self._fail(slot, failure)
                return
            for request_id, result in results:
                pending = slot.unfinished.pop(request_id, None)
                if pending is not None and not pending.future.done():
                    pending.future.set_result(result)

    async def _try_revive(self, slot: _Slot, called: int, death: RayActorError) -> None:
        slot.is_down = True
        try:
            await asyncio.to_thread(self._revive, slot, called, death)
            slot.is_down, slot.outbox = False, []
            self._submit(slot, [(id_, p.request) for id_, p in slot.unfinished.items()])
        except Exception as failure:  # boundary: a revival that fails ends the slot's requests
            self._fail(slot, failure)

    def _revive(self, slot: _Slot, called: int, death: RayActorError) -> None:
        """Replace the `called`-th engine of a slot, unless that has happened meanwhile."""
        with self.exclusively():
            if slot.num_starts == called:
                self._replace(slot, str(self.workers.explain_failure(death, slot.index, "generation")))
                if self.bring_up is not None:
                    self.bring_up()
        logger.warning("Generation engine %d is back at version %d.", slot.index, self.weight_version)

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Keep other threads from replacing engines and moving weights; one thread may nest it.

        Raises:
            DeadlineExceededError: another thread did not finish in `cluster.timeouts.setup_s`.
        """
        if not self._replacing.acquire(timeout=self._setup_timeout_s):
            raise DeadlineExceededError(
                f"Another thread replaced engines or moved weights for more than {self._setup_timeout_s:g} s "
                "(cluster.timeouts.setup_s)."
            )
        try:
            yield
        finally:
            self._replacing.release()

    def with_replacements[T](self, work: Callable[[], T]) -> T:
        """Do what needs every engine; when one of them is dead, replace it and do all of it again.

        A replacement is awake and has no weights yet.

        Raises:
            WorkerDiedError: the run's restarts are used up, or it was no engine that died.
        """
        with self.exclusively():
            while True:
                try:
                    return work()
                except WorkerDiedError:
                    if self.revive_dead() == 0:
                        raise

    def revive_dead(self) -> int:
        """Replace engines that died while nothing was in flight; returns how many.

        Raises:
            WorkerDiedError: the run's restarts are used up.
        """
        num_revived = 0
        for slot in self._slots:
            try:
                ref = self._call(slot, "ready")
                self.workers.get_worker_result(ref, slot.index, self._setup_timeout_s, "engine check")
            except WorkerDiedError as death:
                self._replace(slot, str(death))
                num_revived += 1
        return num_revived

    def _replace(self, slot: _Slot, reason: str) -> None:
        """Put a new engine into a slot, if the run has a restart left."""
        self.num_restarts += 1
        if self.num_restarts > self._max_restarts:
            raise WorkerDiedError(
                f"Generation engine {slot.index} died and cluster.max_actor_restarts="
                f"{self._max_restarts} restarts are used up. {reason}"
            )
        logger.warning(
            "Generation engine %d died; restarting it (%d of %d) and re-issuing %d requests. %s",
            slot.index,
            self.num_restarts,
            self._max_restarts,
            len(slot.unfinished),
            reason.splitlines()[0],
        )
        self.workers.restart_worker(slot.index, self._setup_timeout_s)
        slot.num_starts += 1

    def _fail(self, slot: _Slot, failure: Exception) -> None:
        """Pass a failure on to all that waits for the slot."""
        if isinstance(failure, RayError):
            failure = self.workers.explain_failure(failure, slot.index, "generation")
        for pending in slot.unfinished.values():
            if not pending.future.done():
                pending.future.set_exception(failure)
        slot.unfinished.clear()

    def shutdown(self) -> None:
        """Kill the engine actors."""
        self.workers.shutdown(force=True)
