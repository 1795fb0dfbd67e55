"""Run the loop of engines that advance all requests with a plain function `step`.

    generate() ─► add_request ─► _run: step(), step(), ... ─► futures of generate()
                                   │ between steps: requests, aborts and weight updates
    begin_weight_update() ... load_tensors() ... finish_weight_update() ◄── no step in between

Invariants: an engine gets other calls only between two steps. No step runs with incompletely loaded weights. Each token
of a response is recorded with the version of the weights that drew it.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_rl.models.generation.engine_load import EngineLoad
from nemo_rl.models.generation.interfaces import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    ResponseSoFar,
    VersionSpan,
)
from nemo_rl.models.training.tensor_checks import listed
from nemo_rl.utils.errors import GenerationError, NonFiniteError

_OVERFLOW = (
    "No weight that the engine can check holds NaN or infinity, so activations may overflow: try another "
    "precision (policy.generation.engine.precision)."
)


_TURNS = 6
"""Number of event-loop iterations between two steps. An answer needs several iterations to reach its caller."""
_PAUSE_EVERY_S = 0.05
_PAUSE_S = 0.001
"""Pause of the engine for calls that have arrived, in seconds. Before a call begins, Ray passes it several times
between the event loop and another thread. Without a pause, each of these exchanges takes as long as a step."""
_QUIET_S, _QUIET_PAUSE_S = 0.5, 0.0002
"""Seconds without a started call or ended answer, after which probably no call is waiting and the pause is shorter."""


class Finished(NamedTuple):
    """A finished response with the fields of `GenerationResult` as lists, or a refused request with an `error`."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    error: str | None = None
    routed_experts: NDArray[np.signedinteger[Any]] | None = None


@dataclass
class _InProgress:
    answer: asyncio.Future[GenerationResult]
    versions: list[VersionSpan]
    is_read_again: bool


class SteppedEngine(ABC):
    """An `Engine` that does all of its work in `step`. Its first weights have version 0."""

    def __init__(self) -> None:
        self._version = 0
        self._in_force: int | None = None
        """Version of the loaded weights. None before the first update and during an update."""
        self._before_update: int | None = None
        self._running: dict[str, _InProgress] = {}
        self._may_step = asyncio.Event()
        self._may_step.set()
        self._steps: asyncio.Task[None] | None = None
        self._paused_at = 0.0
        self._busy_at = 0.0
        """Time at which a call last began or an answer last ended. After an answer, its caller usually makes a call."""

    @abstractmethod
    def add_request(self, request_id: str, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            GenerationError: the request can never be served.
        """

    @abstractmethod
    def step(self) -> list[Finished]:
        """Advance all queued requests by one or a few tokens, and return the finished ones.

        Raises:
            NonFiniteError: the scores of a token are not finite.
        """

    @abstractmethod
    def remove_requests(self, request_ids: Collection[str]) -> list[Finished]:
        """Stop running requests, and return them with their tokens so far and the finish reason "abort"."""

    def sampled_so_far(self, request_id: str) -> tuple[list[int], list[float]] | None:
        """Return the tokens of a running request's response so far, with their log-probabilities.

        By default, return None, because the tokens are not known. A resumed run then samples the whole response.
        """
        return None

    @abstractmethod
    def num_tokens(self, request_id: str) -> int:
        """Return the number of tokens in the response of a running request."""

    def finish_steps(self) -> list[Finished]:
        """Return the results of steps computed ahead, so that no token of old weights follows an update.

        By default there are none, because a step returns when its tokens are drawn.
        """
        return []

    @abstractmethod
    def start_loading(self) -> None:
        """Prepare for new weights, even if the last update was interrupted."""

    @abstractmethod
    async def load_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load some of the new tensors (`Engine.load_tensors`)."""

    @abstractmethod
    def finish_loading(self, *, changed: bool) -> list[str]:
        """Activate the loaded weights, and return the names of the engine's parameters that were not loaded.

        Args:
            changed: Whether the weights may differ from the previous ones. If so, new requests must not use cached keys
                and values, and running requests may do so only if `EngineSettings.recomputes_cache` is false. If not
                (another engine was replaced), running requests continue unchanged.
        """

    @abstractmethod
    async def layer_outputs(self, token_ids: list[int]) -> list[torch.Tensor]:
        """Return a prompt's hidden states after each layer (`Engine.layer_outputs`)."""

    @abstractmethod
    async def sleep(self) -> None:
        """Free memory until `wake_up` (`Engine.sleep`)."""

    @abstractmethod
    async def wake_up(self) -> None:
        """Allocate memory again (`Engine.wake_up`)."""

    def weights_not_finite(self) -> list[str]:
        """Return the names of weights with NaN or infinity. By default, return no names."""
        return []

    def take_load(self) -> EngineLoad | None:
        """Return the load since the last call. By default, return None."""
        return None

    def decode(self, token_ids: list[int]) -> str | None:
        """Decode the text of a response (`GenerationResult.text`)."""
        return None

    def generate(self, request_id: str, request: GenerationRequest) -> asyncio.Future[GenerationResult]:
        """Accept a request, and return an awaitable response (`Engine.generate`)."""
        loop = asyncio.get_running_loop()
        self._busy_at = time.monotonic()
        answer: asyncio.Future[GenerationResult] = loop.create_future()
        try:
            self.add_request(request_id, request)
        except GenerationError as refusal:
            answer.set_exception(refusal)
            return answer
        self._running[request_id] = _InProgress(answer, [VersionSpan(0, self._version)], request.sampling.is_read_again)
        if self._steps is None or self._steps.done():
            self._steps = loop.create_task(self._run())
            self._steps.add_done_callback(self._pass_on_failure)
        return answer

    async def abort(self, request_ids: Collection[str]) -> None:
        """End requests with their tokens so far (`Engine.abort`)."""
        self._busy_at = time.monotonic()
        self._answer(self.remove_requests([id_ for id_ in request_ids if id_ in self._running]))

    async def responses_so_far(self, request_ids: Collection[str]) -> dict[str, ResponseSoFar]:
        """Return the tokens sampled so far by running requests, between two steps (`Engine`)."""
        self._busy_at, found = time.monotonic(), {}
        for request_id in self._running.keys() & set(request_ids):
            sampled = self.sampled_so_far(request_id)
            if sampled is None:
                continue
            token_ids, logprobs = sampled
            spans = [span for span in self._running[request_id].versions if span.start < len(token_ids)]
            found[request_id] = ResponseSoFar(np.array(token_ids, np.int32), np.array(logprobs, np.float32), spans)
        return found

    async def begin_weight_update(self) -> None:
        """Prepare for new weights (`Engine.begin_weight_update`)."""
        self._busy_at = time.monotonic()
        self._may_step.clear()
        self._before_update, self._in_force = self._in_force, None
        self._answer(self.finish_steps())
        self.start_loading()

    async def finish_weight_update(self, version: int) -> list[str]:
        """Activate the new weights (`Engine.finish_weight_update`)."""
        unbound = self.finish_loading(changed=version != self._before_update)
        self._version = self._in_force = version
        for request_id, running in self._running.items():
            self._note_version(running.versions, self.num_tokens(request_id))
        self._may_step.set()
        return unbound

    def _note_version(self, versions: list[VersionSpan], num_tokens: int) -> None:
        if versions[-1].start == num_tokens:
            versions.pop()
        if not versions or versions[-1].version != self._version:
            versions.append(VersionSpan(num_tokens, self._version))

    async def _run(self) -> None:
        while self._running:
            if self._may_step.is_set():
                self._answer(self._checked_step())
            else:
                await self._may_step.wait()
            await self._let_calls_begin()

    async def _let_calls_begin(self) -> None:
        now = time.monotonic()
        if now - self._paused_at > _PAUSE_EVERY_S:
            await asyncio.sleep(_PAUSE_S if now - self._busy_at < _QUIET_S else _QUIET_PAUSE_S)
            self._paused_at = time.monotonic()
        for _ in range(_TURNS):
            await asyncio.sleep(0)

    def _checked_step(self) -> list[Finished]:
        """Call `step`. If a score is not finite, the error names the weights that are not finite."""
        try:
            return self.step()
        except NonFiniteError as error:
            names = self.weights_not_finite()
            cause = f"The engine's weights are not finite: {listed(names)}." if names else _OVERFLOW
            raise NonFiniteError(f"{error} {cause}") from None

    def _answer(self, finished: list[Finished]) -> None:
        for request_id, token_ids, logprobs, reason, error, routed_experts in finished:
            self._busy_at = time.monotonic()
            running = self._running.pop(request_id)
            if running.answer.done():
                continue
            if error is not None:
                running.answer.set_exception(GenerationError(error))
                continue
            first, *others = running.versions
            running.answer.set_result(
                GenerationResult(
                    np.array(token_ids, dtype=np.int32),
                    np.array(logprobs, dtype=np.float32),
                    reason,
                    # Weights may have come after the last token was drawn, if an engine computes more than tokens.
                    [first, *(span for span in others if span.start < len(token_ids))],
                    text=self.decode(token_ids),
                    scored_by=running.versions[-1].version if running.is_read_again else None,
                    routed_experts=routed_experts,
                )
            )

    def _pass_on_failure(self, steps: asyncio.Task[None]) -> None:
        """Fail all running responses after a failed step."""
        failure = None if steps.cancelled() else steps.exception()
        if failure is not None:
            for running in self._running.values():
                if not running.answer.done():
                    running.answer.set_exception(failure)
            self._running.clear()
