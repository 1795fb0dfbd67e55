"""The actor around one engine: queues requests, steps the engine, hands out what finished.

Loops and who waits for whom (all on the actor's one asyncio loop, so nothing runs at the same time):

    submit() ──► engine queue ──► _run loop: engine.step() ──► _finished ──► collect() (long poll)
                                     │ yields after each step, so weight updates land between steps
    begin_weight_update() ... receive_bucket() ... finish_weight_update() ◄── controller; no step in between

Invariant: an engine is touched only between two steps, and never steps on half of its new weights.
"""

import asyncio
import logging
import os
from typing import Any

import torch

from nemo_rl.models.generation.interfaces import (
    Engine,
    EngineSettings,
    GenerationRequest,
    GenerationResult,
)
from nemo_rl.utils.errors import GenerationError
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.endpoints import WeightReceiver
from nemo_rl.weight_sync.interfaces import TransportSpec
from nemo_rl.weight_sync.verify import SyncReceipt

logger = logging.getLogger(__name__)

COLLECT_POLL_S = 60.0


def make_engine(settings: EngineSettings) -> Engine:
    """Build the engine a backend names; the backend's library is imported only here, in the actor."""
    if settings.backend == "vllm":
        from nemo_rl.models.generation.vllm.engine import VllmEngine

        return VllmEngine(settings)
    from nemo_rl.models.generation.hf.engine import HfEngine

    return HfEngine(settings)


class GenerationWorker:
    """Hosts one engine.

    Args:
        settings: what to build. The engine's index among those of the run is its RANK.
    """

    def __init__(self, settings: EngineSettings):
        self._engine = make_engine(settings)
        self._engine_index = int(os.environ["RANK"])
        self._receiver: WeightReceiver | None = None
        self._finished: list[tuple[str, GenerationResult]] = []
        self._has_finished = asyncio.Event()
        self._may_step = asyncio.Event()
        self._may_step.set()
        self._loop_task: asyncio.Task[None] | None = None

    async def ready(self) -> int:
        """Answers once the engine is built; returns its index."""
        return self._engine_index

    async def submit(self, requests: list[tuple[str, GenerationRequest]]) -> None:
        """Queue requests; a request the engine refuses is answered with its error through `collect`."""
        for request_id, request in requests:
            try:
                self._engine.add_request(request_id, request)
            except GenerationError as refusal:
                version = self._engine.weight_version
                result = GenerationResult([], [], "length", version, error=str(refusal))
                self._deliver([(request_id, result)])
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self._engine.has_unfinished():
            while not self._may_step.is_set():
                await self._may_step.wait()
            self._deliver(self._engine.step())
            await asyncio.sleep(0)

    def _deliver(self, results: list[tuple[str, GenerationResult]]) -> None:
        if results:
            self._finished += results
            self._has_finished.set()

    async def collect(self) -> list[tuple[str, GenerationResult]]:
        """Results finished since the last call; waits for one up to `COLLECT_POLL_S`, then answers empty.

        Raises:
            Exception: whatever broke the engine's loop.
        """
        if not self._finished:
            waiters: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._has_finished.wait())]
            if self._loop_task is not None and not self._loop_task.done():
                waiters.append(self._loop_task)
            await asyncio.wait(waiters, timeout=COLLECT_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            waiters[0].cancel()
        if self._loop_task is not None and self._loop_task.done() and not self._finished:
            self._loop_task.result()
        results, self._finished = self._finished, []
        self._has_finished.clear()
        return results

    async def begin_weight_update(self, spec: TransportSpec, version: int) -> None:
        """Start taking weights of `version` through the transport of `spec`; requests wait until the end."""
        self._may_step.clear()
        if self._receiver is None or self._receiver.spec != spec:
            if self._receiver is not None:
                self._receiver.close()
            self._receiver = await asyncio.to_thread(WeightReceiver, spec, self._engine_index)
        self._receiver.begin(version)
        self._engine.begin_weight_update()

    async def receive_bucket(self, bucket: Bucket) -> None:
        """Take one bucket of weights."""
        assert self._receiver is not None, "begin_weight_update comes first"
        self._receiver.receive(bucket, self._engine.load_tensors)

    async def finish_weight_update(self, version: int) -> SyncReceipt:
        """Put the received weights in force and answer with a receipt."""
        assert self._receiver is not None, "begin_weight_update comes first"
        unbound = self._engine.finish_weight_update(version)
        self._may_step.set()
        return self._receiver.finish(unbound)

    async def layer_outputs(self, token_ids: list[int]) -> list[torch.Tensor]:
        """Hidden states `[T, D]` behind each decoder layer for a prompt; see `algorithms.rollout.sync_probe`."""
        return self._engine.layer_outputs(token_ids)

    async def sleep(self) -> None:
        """Give memory back to the trainer sharing the device."""
        self._engine.sleep()

    async def wake_up(self) -> None:
        """Take memory again."""
        self._engine.wake_up()
