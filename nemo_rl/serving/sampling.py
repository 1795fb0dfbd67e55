"""Answer the requests of sampling sessions.

    asample ─► body in a file ─► place at the gate ─► sampler in memory ─► sequences and scores ─► Promise

Invariant: the tokens depend on the weights and the body alone, so a request whose result was lost is answered again
from its file with the same tokens.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from nemo_rl.models.generation.interfaces import GenerationResult
from nemo_rl.serving.interfaces import PROCESS_LOSSES, AdapterModels, PromptScores, RequestError, ScoreRequest
from nemo_rl.serving.limits import RefusedError, UserLimits
from nemo_rl.serving.promises import Promise, RequestOutcome
from nemo_rl.serving.samplers import SamplerPool
from nemo_rl.serving.state import ServiceState
from nemo_rl.serving.store.sessions import SamplingSession
from nemo_rl.serving.store.storage import store_bytes
from nemo_rl.serving.store.tenants import digest_of
from nemo_rl.serving.turns import FairGate
from nemo_rl.serving.wire.bodies import SampleBody, read_body, read_json
from nemo_rl.serving.wire.samples import SampleCall, read_sample, write_sample

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class SampleRunner:
    """Requests to sample."""

    models: AdapterModels
    """The models."""
    state: ServiceState
    """Files."""
    pool: SamplerPool
    """Samplers in memory."""
    limits: UserLimits
    """Limits of users."""
    note_error: Callable[[BaseException], None] = lambda error: None
    """Function that is called with each error of the server."""
    gate: FairGate = field(init=False)
    """Places of sequences that are sampled at the same time."""
    _tasks: dict[str, "asyncio.Task[bytes]"] = field(default_factory=dict, init=False)
    """Running requests by id."""
    _callbacks: dict["asyncio.Task[bytes]", Callable[["asyncio.Task[bytes]"], None]] = field(
        default_factory=dict, init=False
    )
    """Function that is called at the end of each request."""

    def __post_init__(self) -> None:
        self.gate = FairGate(self.limits.config.max_concurrent_samples)

    def submit(self, owner: str, sampler: SamplingSession, seq_id: int, raw: bytes) -> Promise:
        """Start to answer a request, or return the promise of the same request.

        Args:
            owner: the user.
            raw: body of the request.

        Raises:
            RequestError: another request has the same number, or the request is wrong.
            StorageError: the request cannot be stored.
            BusyError: the user samples too much at the same time.
        """
        request_id, digest = f"{sampler.id}:{seq_id}", digest_of("asample", raw)
        known = self.state.promises.get(request_id)
        if known is not None:
            if known.digest != digest:
                raise RequestError(f"The request {request_id} was sent before with another body.")
            return known
        call = read_sample(read_body(SampleBody, read_json(raw)), self.models.limits, (sampler.id, seq_id))
        self.limits.check_samples(owner, len(call.seeds))
        file = self.state.sample_file(sampler, seq_id)
        if not (file.exists() and file.read_bytes() == raw):
            store_bytes(file, raw)
        return self._start(owner, sampler, call, self.state.promises.add(Promise(request_id, digest)))

    def resume(self, owner: str, sampler: SamplingSession, seq_id: int) -> Promise | None:
        """Answer a request of an earlier process again, or return None if its body is not stored any more."""
        file = self.state.sample_file(sampler, seq_id)
        return self.submit(owner, sampler, seq_id, file.read_bytes()) if file.exists() else None

    def cancel(self, request_id: str) -> None:
        """End a request that runs. Its result is an error."""
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """End all requests. A later process answers them again."""
        for task in self._tasks.values():
            task.remove_done_callback(self._callbacks.pop(task, _nothing))
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=5.0)

    def _start(self, owner: str, sampler: SamplingSession, call: SampleCall, promise: Promise) -> Promise:
        number = len(call.seeds)
        self.limits.waiting_samples[owner] += number
        folder = self.state.sampler_folder(sampler) if sampler.has_folder else None

        async def answer() -> bytes:
            limit = asyncio.timeout(self.limits.config.command_s)
            async with self.gate.place(owner, number), limit, self.pool.use(folder) as name:
                return await self.answer(name, call)

        def ended(task: "asyncio.Task[bytes]") -> None:
            self._callbacks.pop(task, None)
            del self._tasks[promise.id]
            self.limits.waiting_samples[owner] -= number
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self.note_error(error)
            if not isinstance(error, PROCESS_LOSSES):
                promise.resolve(_outcome(task, promise.id))

        task = asyncio.create_task(answer())
        self._tasks[promise.id], self._callbacks[task] = task, ended
        task.add_done_callback(ended)
        return promise

    async def answer(self, sampler: str | None, call: SampleCall) -> bytes:
        """Sample the sequences of a request, and compute what it asks for besides.

        Args:
            sampler: name of a sampler in memory, or None for the base model.

        Returns:
            Bytes of a message `SampleResponse`.
        """
        results = await self.sequences(sampler, call)
        scores = None
        if call.score is not None:
            scores = await self.models.score(sampler, call.prompt, call.score)
            if call.score.last_n is not None:
                _hide(scores, len(call.prompt) - call.score.last_n)
        sampled_scores: list[PromptScores] = []
        if call.top_sampled:
            for result in results:
                whole = [*call.prompt, *result.token_ids.tolist()]
                request = ScoreRequest(call.top_sampled, None, len(result.token_ids))
                sampled_scores.append(await self.models.score(sampler, whole, request))
        return write_sample(call, results, scores, sampled_scores)

    async def sequences(self, sampler: str | None, call: SampleCall) -> list[GenerationResult]:
        """Sample the sequences of a request.

        Raises:
            RequestError: the engine refuses the request.
        """
        drawn = (self.models.sample(sampler, call.prompt, call.sampling, seed) for seed in call.seeds)
        results = await asyncio.gather(*drawn)
        for result in results:
            if result.error is not None:
                raise RequestError(result.error)
            if result.finish_reason == "abort":
                raise RuntimeError("the engine has ended a sequence")
        return [replace(result, text=None) for result in results]


def _nothing(task: "asyncio.Task[bytes]") -> None:
    """Do nothing."""


def _hide(scores: PromptScores, first: int) -> None:
    """Make the log-probabilities before a position NaN, which were not requested."""
    scores.logprobs[:first] = np.nan
    if scores.top_ids is not None and scores.top_logprobs is not None:
        scores.top_ids[:first], scores.top_logprobs[:first] = 0, -99999.0


def _outcome(task: "asyncio.Task[bytes]", request_id: str) -> RequestOutcome:
    """Return the result of a request that has ended."""
    if task.cancelled():
        return RequestOutcome.failed("The request was cancelled.", "user")
    error = task.exception()
    if error is None:
        return RequestOutcome(task.result(), is_proto=True)
    if isinstance(error, RequestError | RefusedError):
        return RequestOutcome.failed(str(error), "user")
    logger.error("%s has failed", request_id, exc_info=error)
    return RequestOutcome.failed(f"The server could not sample: {type(error).__name__}.", "server")
