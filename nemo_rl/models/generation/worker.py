"""The actor around one engine, or one worker of an engine that has several: hands requests in and answers out.

Who waits for whom (all on the actor's one asyncio loop, so nothing runs at the same time):

    submit() ──► engine.generate() ─► _note ──► _finished ──► collect() (long poll)
    abort()  ──► engine.abort() ─────► (the same way, with the tokens so far)
    begin_weight_update() ... receive_bucket() ... finish_weight_update() ◄── controller

Invariant: a request is answered exactly once, however it ends.
"""

import asyncio
import os
from contextlib import suppress
from functools import partial

import torch

from nemo_rl.models.generation.interfaces import (
    COLLECT_POLL_S,
    EngineSettings,
    GenerationRequest,
    GenerationResult,
    engine_of,
)
from nemo_rl.models.generation.registry import make_engine
from nemo_rl.optimizations.host_allocator import keep_freed_memory
from nemo_rl.optimizations.switch import is_on
from nemo_rl.utils.errors import GenerationError
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.endpoints import WeightReceiver
from nemo_rl.weight_sync.transport import TransportSpec
from nemo_rl.weight_sync.verify import SyncReceipt


class GenerationWorker:
    """Hosts one engine.

    Args:
        settings: what to build. Its place among all workers of all engines is its RANK.
    """

    def __init__(self, settings: EngineSettings):
        self._rank = int(os.environ["RANK"])
        index, place = engine_of(self._rank, settings.num_workers)
        self._engine = make_engine(settings, place)
        self._name = f"engine {index}, worker {place}"
        self._receiver: WeightReceiver | None = None
        self._finished: list[tuple[str, GenerationResult]] = []
        self._failure: BaseException | None = None
        self._has_news = asyncio.Event()
        if settings.device == "cpu" and is_on("host_allocator", settings.optimizations):
            keep_freed_memory()

    async def ready(self) -> int:
        """Answers once the engine is built; returns the worker's rank."""
        return self._rank

    async def submit(self, requests: list[tuple[str, GenerationRequest]]) -> None:
        """Hand requests to the engine; they are answered through `collect`, also those it refuses."""
        for request_id, request in requests:
            answer = asyncio.ensure_future(self._engine.generate(request_id, request))
            answer.add_done_callback(partial(self._note, request_id))

    async def abort(self, request_ids: list[str]) -> None:
        """End requests; those that were under way are answered through `collect` with the tokens so far."""
        await self._engine.abort(request_ids)

    def _note(self, request_id: str, answer: asyncio.Future[GenerationResult]) -> None:
        failure = answer.exception()
        if failure is None:
            self._finished.append((request_id, answer.result()))
        elif isinstance(failure, GenerationError):
            self._finished.append((request_id, GenerationResult.refused(str(failure))))
        else:
            self._failure = failure
        self._has_news.set()

    async def collect(self, poll_s: float = COLLECT_POLL_S) -> list[tuple[str, GenerationResult]]:
        """Results finished since the last call; waits for one up to `poll_s` seconds, then answers empty.

        Raises:
            Exception: whatever broke the engine.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_news.wait(), poll_s)
        if self._failure is not None and not self._finished:
            failure, self._failure = self._failure, None
            self._has_news.clear()
            raise failure
        results, self._finished = self._finished, []
        if self._failure is None:
            self._has_news.clear()
        return results

    async def begin_weight_update(self, spec: TransportSpec, version: int) -> None:
        """Start taking weights of `version` through the transport of `spec`; requests wait until the end."""
        if self._receiver is None or self._receiver.spec != spec:
            if self._receiver is not None:
                self._receiver.close()
            self._receiver = await asyncio.to_thread(WeightReceiver, spec, self._rank, self._name)
        self._receiver.begin(version)
        await self._engine.begin_weight_update()

    async def receive_bucket(self, bucket: Bucket) -> None:
        """Take one bucket of weights."""
        assert self._receiver is not None, "begin_weight_update comes first"
        with self._receiver.received(bucket) as tensors:
            await self._engine.load_tensors(tensors)

    async def finish_weight_update(self, version: int) -> SyncReceipt:
        """Put the received weights in force and answer with a receipt."""
        assert self._receiver is not None, "begin_weight_update comes first"
        return self._receiver.finish(await self._engine.finish_weight_update(version))

    async def layer_outputs(self, token_ids: list[int]) -> list[torch.Tensor]:
        """Hidden states `[T, D]` behind each decoder layer for a prompt; see `algorithms.rollout.sync_probe`."""
        return await self._engine.layer_outputs(token_ids)

    async def sleep(self) -> None:
        """Give memory back to the trainer sharing the device."""
        await self._engine.sleep()

    async def wake_up(self) -> None:
        """Take memory again."""
        await self._engine.wake_up()
