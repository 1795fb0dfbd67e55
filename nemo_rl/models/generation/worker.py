"""Host an engine, or one of its workers, in an actor, which accepts requests and returns results.

All of this runs on the actor's only asyncio loop, so steps never run concurrently:

    submit() ──► engine.generate() ─► _note ──► _finished ──► collect() (long poll)
    abort()  ──► engine.abort() ─────► (the same way, with the tokens so far)
    responses_so_far() ──► between two steps, which go on
    begin_weight_update() ... receive_bucket() ... finish_weight_update() ◄── controller

Invariant: each request gets exactly one result, also after an error.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from nemo_rl.distributed.ranks.process_group import outlive_failed_groups
from nemo_rl.host.row_invariance import compute_rows_alike
from nemo_rl.models.adapters.tensors import AdapterTensors
from nemo_rl.models.generation.engine_load import EngineLoad
from nemo_rl.models.generation.interfaces import (
    COLLECT_POLL_S,
    Collected,
    EngineSettings,
    GenerationRequest,
    GenerationResult,
    RecordsReads,
    ResponseSoFar,
    engine_of,
)
from nemo_rl.models.generation.registry import engine_rows, grammar_refusal, make_engine
from nemo_rl.optimizations.process_tuning import keep_freed_memory
from nemo_rl.optimizations.switch import is_on
from nemo_rl.utils.errors import GenerationError
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.endpoints import WeightReceiver
from nemo_rl.weight_sync.parts import BlocksByName
from nemo_rl.weight_sync.transport import TransportSpec
from nemo_rl.weight_sync.verify import SyncReceipt


class GenerationWorker:
    """Host one engine.

    Args:
        settings: Settings of the engine. RANK in the environment is the worker's position among all engines' workers.
    """

    def __init__(self, settings: EngineSettings):
        outlive_failed_groups()  # failed groups of weight syncs
        self._rank = int(os.environ["RANK"])
        index, place = engine_of(self._rank, settings.num_workers)
        if settings.zero_mismatch:
            compute_rows_alike(settings.trainer_ranks)
        self._engine = make_engine(settings, place)
        self._take_load: Callable[[], EngineLoad | None] = getattr(self._engine, "take_load", lambda: None)
        self._accepted = engine_rows(settings.backend)
        self._grammar_refusal = grammar_refusal(settings.backend)
        self._name = f"engine {index}, worker {place}"
        self._receiver: WeightReceiver | None = None
        self._finished: list[tuple[str, GenerationResult]] = []
        self._failure: BaseException | None = None
        self._has_news = asyncio.Event()
        self._num_calls = 0
        """Number of calls of `collect`."""
        if settings.device == "cpu" and is_on("host_allocator", settings.optimizations):
            keep_freed_memory()

    async def ready(self) -> int:
        """Return the worker's rank as soon as the engine is built."""
        return self._rank

    async def submit(self, requests: list[tuple[str, GenerationRequest]]) -> None:
        """Pass requests to the engine. `collect` returns their results, also those of refused requests."""
        for request_id, request in requests:
            refusal = self._refusal(request)
            if refusal is not None:
                self._finished.append((request_id, GenerationResult.refused(refusal)))
                self._has_news.set()
                continue
            answer = asyncio.ensure_future(self._engine.generate(request_id, request))
            answer.add_done_callback(partial(self._note, request_id))

    def _refusal(self, request: GenerationRequest) -> str | None:
        """Return the reason why the engine refuses a request, or None if it accepts it."""
        if request.sampling.grammar is not None and self._grammar_refusal is not None:
            return self._grammar_refusal
        if request.adapter is not None and not hasattr(self._engine, "add_adapter"):
            return f"This engine has no adapters, and the request names {request.adapter!r}."
        return self._accepted.refusal(request.row_inputs) if request.row_inputs else None

    async def abort(self, request_ids: list[str]) -> None:
        """End requests. `collect` returns the tokens so far of those that were running."""
        await self._engine.abort(request_ids)

    async def responses_so_far(self, request_ids: list[str]) -> dict[str, ResponseSoFar]:
        """Return the tokens sampled so far for the running requests, which continue.

        If the engine cannot tell, no tokens are returned.
        """
        so_far = getattr(self._engine, "responses_so_far", None)
        if so_far is None:
            return {request_id: ResponseSoFar.nothing() for request_id in request_ids}
        found: dict[str, ResponseSoFar] = await so_far(request_ids)
        return found

    def _note(self, request_id: str, answer: asyncio.Future[GenerationResult]) -> None:
        failure = answer.exception()
        if failure is None:
            self._finished.append((request_id, answer.result()))
        elif isinstance(failure, GenerationError):
            self._finished.append((request_id, GenerationResult.refused(str(failure))))
        else:
            self._failure = failure
        self._has_news.set()

    async def collect(self, poll_s: float = COLLECT_POLL_S) -> Collected:
        """Return the results since the last call. If there are none, wait for one for up to `poll_s` seconds.

        The report also contains the load of the engine since the last call. If another call arrives, this call ends
        without results, because its caller may have died.

        Raises:
            Exception: The failure of the engine.
        """
        self._num_calls += 1
        number = self._num_calls
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_news.wait(), poll_s)
        if number != self._num_calls:
            return Collected([])
        if self._failure is not None and not self._finished:
            failure, self._failure = self._failure, None
            self._has_news.clear()
            raise failure
        results, self._finished = self._finished, []
        if self._failure is None:
            self._has_news.clear()
        return Collected(results, self._take_load())

    async def begin_weight_update(self, spec: TransportSpec, version: int) -> None:
        """Start to receive weights of `version` through the transport of `spec`, while requests wait until the end."""
        if self._receiver is None or self._receiver.spec != spec:
            if self._receiver is not None:
                self._receiver.close()
            self._receiver = await asyncio.to_thread(WeightReceiver, spec, self._rank, self._name)
        self._receiver.begin(version)
        await self._engine.begin_weight_update()

    async def record_reads(self) -> None:
        """Record which parts of tensors the engine reads in the next update, if it supports this."""
        if isinstance(self._engine, RecordsReads):
            self._engine.record_reads()

    async def take_reads(self) -> BlocksByName:
        """Return the parts that the engine has read since `record_reads`. Return no parts if they were not recorded."""
        return self._engine.take_reads() if isinstance(self._engine, RecordsReads) else {}

    async def receive_bucket(self, bucket: Bucket) -> None:
        """Receive one bucket of weights."""
        assert self._receiver is not None, "begin_weight_update comes first"
        with self._receiver.received(bucket) as tensors:
            await self._engine.load_tensors(tensors)

    async def finish_weight_update(self, version: int) -> SyncReceipt:
        """Activate the received weights and return a receipt."""
        assert self._receiver is not None, "begin_weight_update comes first"
        unbound = await self._engine.finish_weight_update(version)
        altered: list[str] = []
        if self._receiver.spec.verify:
            altered = getattr(self._engine, "weights_not_as_sent", list)()
        return self._receiver.finish(unbound, altered)

    async def weights_not_finite(self) -> list[str]:
        """Return the names of weights with NaN or infinity, or no names if the engine does not check them."""
        names: list[str] = getattr(self._engine, "weights_not_finite", list)()
        return names

    async def layer_outputs(self, token_ids: list[int]) -> list[torch.Tensor]:
        """Return a prompt's hidden states `[T, D]` after each decoder layer (`algorithms.rollout.sync_setup`)."""
        return await self._engine.layer_outputs(token_ids)

    async def add_adapter(self, name: str, adapter: AdapterTensors) -> None:
        """Give the engine an adapter, which requests may name from now on."""
        self._engine.add_adapter(name, adapter)  # type: ignore[attr-defined]  # `EngineSettings.holds_adapters`

    async def drop_adapter(self, name: str) -> None:
        """Let the engine forget an adapter."""
        self._engine.drop_adapter(name)  # type: ignore[attr-defined]  # as above

    async def sleep(self) -> None:
        """Free memory for the trainer on the same device."""
        await self._engine.sleep()

    async def wake_up(self) -> None:
        """Allocate memory again."""
        await self._engine.wake_up()
