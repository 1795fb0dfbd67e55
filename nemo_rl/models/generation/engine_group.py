"""Controller side of several engines: spreads requests, gathers results, replaces engines that die.

Map (everything below runs on the rollout event loop, see `experience.event_loop`):

    generate() ─► least busy engine's outbox ─► _flush (next tick, one call per engine) ─► worker.submit
    _collect task per engine ─► worker.collect (long poll) ─► resolves the futures of generate()
    engine dies ─► _revive: new actor, current weights (`bring_up`), unfinished requests submitted again

Law: a request is answered exactly once, and with the same tokens whichever engine serves it.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError

from nemo_rl.models.generation.interfaces import (
    GenerationInterface,
    GenerationRequest,
    GenerationResult,
)
from nemo_rl.utils.errors import DeadlineExceededError, GenerationError, WorkerDiedError

logger = logging.getLogger(__name__)

SpawnEngine = Callable[[int], Any]


@dataclass
class _Pending:
    request: GenerationRequest
    future: asyncio.Future[GenerationResult]


@dataclass
class EngineSlot:
    """One engine's actor and the requests it owes an answer to."""

    index: int
    actor: Any
    unfinished: dict[str, _Pending] = field(default_factory=dict)
    outbox: list[tuple[str, GenerationRequest]] = field(default_factory=list)
    collector: asyncio.Task[None] | None = None


class EngineGroup(GenerationInterface):
    """Engines behind one `generate`.

    Args:
        spawn: starts the actor of engine `index`; called again when it has died.
        num_engines: how many to run.
        setup_timeout_s: limit for building an engine.
        max_restarts: how many engine deaths the run survives.
    """

    def __init__(
        self, spawn: SpawnEngine, num_engines: int, setup_timeout_s: float, max_restarts: int
    ):
        self.weight_version = 0
        self.num_restarts = 0
        self.bring_up: Callable[[], None] | None = None
        self._spawn = spawn
        self._setup_timeout_s = setup_timeout_s
        self._max_restarts = max_restarts
        self._ids = itertools.count()
        self._flush_is_due = False
        self._revival = asyncio.Lock()
        self.slots = [EngineSlot(index, spawn(index)) for index in range(num_engines)]

    def wait_until_ready(self) -> None:
        """Block until every engine is built.

        Raises:
            DeadlineExceededError: an engine is not ready within `setup_timeout_s`.
        """
        refs = [slot.actor.ready.remote() for slot in self.slots]
        _, late = ray.wait(refs, num_returns=len(refs), timeout=self._setup_timeout_s)
        if late:
            missing = [refs.index(ref) for ref in late]
            raise DeadlineExceededError(
                f"Generation engines {missing} were not ready within cluster.timeouts.setup_s="
                f"{self._setup_timeout_s:g} s."
            )
        ray.get(refs)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See `GenerationInterface.generate`."""
        loop = asyncio.get_running_loop()
        pending = _Pending(request, loop.create_future())
        slot = min(self.slots, key=lambda s: (len(s.unfinished), s.index))
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
        """Send what gathered in this tick and make sure someone listens for the answers."""
        self._flush_is_due = False
        for slot in self.slots:
            if slot.outbox:
                slot.actor.submit.remote(slot.outbox)
                slot.outbox = []
            if slot.unfinished and (slot.collector is None or slot.collector.done()):
                slot.collector = asyncio.get_running_loop().create_task(self._collect(slot))

    async def _collect(self, slot: EngineSlot) -> None:
        """Take results from one engine until it owes none."""
        while slot.unfinished:
            try:
                results = await slot.actor.collect.remote()
            except RayActorError as death:
                await self._try_revive(slot, death)
                continue
            except Exception as failure:  # boundary: whatever broke the engine ends its requests
                _fail(slot, failure)
                return
            for request_id, result in results:
                pending = slot.unfinished.pop(request_id, None)
                if pending is not None and not pending.future.done():
                    pending.future.set_result(result)

    async def _try_revive(self, slot: EngineSlot, death: RayActorError) -> None:
        try:
            async with self._revival:
                await self._revive(slot, death)
        except Exception as failure:  # boundary: a revival that fails ends the slot's requests
            _fail(slot, failure)

    async def _revive(self, slot: EngineSlot, death: RayActorError) -> None:
        self._count_restart(slot.index, death, len(slot.unfinished))
        slot.actor = self._spawn(slot.index)
        await asyncio.wait_for(_as_future(slot.actor.ready.remote()), self._setup_timeout_s)
        if self.bring_up is not None:
            await asyncio.to_thread(self.bring_up)
        slot.outbox = []
        slot.actor.submit.remote([(id_, p.request) for id_, p in slot.unfinished.items()])
        logger.warning("Generation engine %d is back at version %d.", slot.index, self.weight_version)

    def revive_dead(self) -> None:
        """Replace engines that died while nothing was in flight; blocks until they are built."""
        for slot in self.slots:
            try:
                ray.get(slot.actor.ready.remote(), timeout=self._setup_timeout_s)
            except RayActorError as death:
                self._count_restart(slot.index, death, 0)
                slot.actor = self._spawn(slot.index)
        self.wait_until_ready()

    def _count_restart(self, index: int, death: RayActorError, num_unfinished: int) -> None:
        self.num_restarts += 1
        if self.num_restarts > self._max_restarts:
            raise WorkerDiedError(
                f"Generation engine {index} died and cluster.max_actor_restarts="
                f"{self._max_restarts} restarts are used up. {death}"
            ) from death
        logger.warning(
            "Generation engine %d died; restarting it (%d of %d) and re-issuing %d requests. %s",
            index,
            self.num_restarts,
            self._max_restarts,
            num_unfinished,
            str(death).splitlines()[0],
        )

    def shutdown(self) -> None:
        """Kill the engine actors."""
        for slot in self.slots:
            ray.kill(slot.actor)


async def _as_future(ref: Any) -> Any:
    return await ref


def _fail(slot: EngineSlot, failure: Exception) -> None:
    """Pass a failure on to everyone who waits for the slot."""
    for pending in slot.unfinished.values():
        if not pending.future.done():
            pending.future.set_exception(failure)
    slot.unfinished.clear()
