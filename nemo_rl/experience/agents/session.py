"""The calls of the program of one sample: rendered, sampled, and kept in a tree.

    answers(request) ─► history in the tree ─► tokens: the parent's, then those of the new messages ─► engines
                                                                                   answer ─► tree, program

Invariants: what the program gets and what the tree records come from the same tokens; a request that a client sends
again is answered with the same answers, and sampled once.
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from nemo_rl.data.interfaces import Message, TokenizerType
from nemo_rl.data.messages.content import TextRules
from nemo_rl.experience.agents.answers import AnswerReader
from nemo_rl.experience.agents.call_tree import Call, CallTree
from nemo_rl.experience.agents.calls import CallAnswer, CallEnd, CallError, CallRequest
from nemo_rl.experience.agents.prompts import Prompt, PromptRenderer
from nemo_rl.experience.limits import RolloutLimits
from nemo_rl.experience.trajectory import Ending
from nemo_rl.models.generation.interfaces import (
    GenerationInterface,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    VersionSpan,
)
from nemo_rl.utils.errors import DataError, GenerationError

COUNTS = ("calls", "retries", "undelivered", "refused", "unlike_template", "new_trees")
"""Numbers of a session for metrics: answers that were asked for, repeated requests, answers whose client had gone away,
refused requests, histories that the chat template renders in another way, and trees that were started for them."""

_ID = "call-"

type CallSeed = Callable[..., int]
"""Makes the seed of an answer from what tells it apart from the sample's other answers."""


@dataclass(frozen=True)
class SessionSettings:
    """Settings of the sessions of one environment.

    Attributes:
        reader: reads answers.
        max_calls: answers that a program may ask for.
        max_concurrent_calls: requests of a program that are answered at the same time; further ones are refused.
        sampling: whether temperature, top_p and top_k of requests apply, or always those of the run.
        history: "keep" continues the tokens of an earlier answer; "template" starts a new tree where the chat template
            renders the history in another way.
    """

    reader: AnswerReader
    max_calls: int = 64
    max_concurrent_calls: int = 64
    sampling: Literal["run", "request"] = "run"
    history: Literal["keep", "template"] = "keep"


@dataclass(frozen=True)
class CallParts:
    """The parts of the run that a session uses.

    Attributes:
        generation: the engines.
        tokenizer: renders and encodes.
        text_rules: as `RolloutRunner`.
        limits: bounds of the sample.
        sampling: of the run.
    """

    generation: GenerationInterface
    tokenizer: TokenizerType
    text_rules: TextRules
    limits: RolloutLimits
    sampling: SamplingParams


@dataclass(eq=False)
class _Exchange:
    """A request and its answers.

    Attributes:
        task: makes the answers.
        is_delivered: the client has got them, as far as known.
    """

    task: "asyncio.Task[list[CallAnswer]]"
    is_delivered: bool = False


@dataclass(eq=False)
class AgentSession:
    """The calls of one sample.

    Attributes:
        parts: what it uses of the run.
        settings: of its environment.
        seed_of: makes seeds.
        tree: the calls that were answered.
        counts: numbers for metrics.
        bound: the limit that has ended the conversation or cut its last answer off; None if none has.
        failure: set when engines cannot answer any more, which ends the run.
        memory: kept by dialects between requests.
        generation_s: seconds of answers, added up.
    """

    parts: CallParts
    settings: SessionSettings
    seed_of: CallSeed
    tree: CallTree = field(default_factory=CallTree)
    counts: Counter[str] = field(default_factory=Counter)
    bound: Ending | None = None
    failure: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    memory: dict[str, Any] = field(default_factory=dict)
    generation_s: float = 0.0
    _exchanges: dict[str, _Exchange] = field(default_factory=dict)
    """The newest exchange of each request, by the digest of its body."""
    _running: "set[asyncio.Task[list[CallAnswer]]]" = field(default_factory=set)
    _times_asked: Counter[str] = field(default_factory=Counter)
    _prompts: PromptRenderer = field(init=False)
    _num_tokens: int = 0
    """Sampled tokens of all answers."""

    def __post_init__(self) -> None:
        parts = self.parts
        self._prompts = PromptRenderer(parts.tokenizer, parts.text_rules, self.settings.history, self.counts)

    async def answers(self, request: CallRequest, identity: str, *, is_retry: bool) -> list[CallAnswer]:
        """Answer a request, or return the answers of the same request, if the client sends it again.

        Args:
            request: the request.
            identity: equal for requests with the same content.
            is_retry: the client says that it sends the request again. Without that, a request is taken for a repetition
                if the last answers to the same one were not delivered.

        Raises:
            CallError: the request is refused.
        """
        exchange = self._exchanges.get(identity)
        repeats = exchange is not None and (is_retry or (exchange.task.done() and not exchange.is_delivered))
        if exchange is not None and repeats and not _was_refused(exchange.task):
            self.counts["retries"] += 1
        else:
            exchange = self._exchanges[identity] = _Exchange(self._start(request))
        answers = await _result(exchange.task)
        exchange.is_delivered = True
        return answers

    def token_ids(self, request: CallRequest) -> list[int]:
        """Return the tokens that a request would continue.

        Raises:
            CallError: the messages cannot be rendered.
        """
        return self._prompt(request).token_ids

    def note_undelivered(self, identity: str) -> None:
        """Note that the client has gone away before it got its answers."""
        self._exchanges[identity].is_delivered = False
        self.counts["undelivered"] += 1

    async def close(self) -> None:
        """Cancel calls that run."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=1.0)

    def _start(self, request: CallRequest) -> "asyncio.Task[list[CallAnswer]]":
        if len(self._running) >= self.settings.max_concurrent_calls:
            self.counts["refused"] += 1
            most = self.settings.max_concurrent_calls
            raise CallError(429, f"{most} requests of this key are being answered; wait for one.", "too_many_requests")
        task = asyncio.create_task(self._answers(request))
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[list[CallAnswer]]") -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, CallError):
            self.counts["refused"] += 1
        elif error is not None and not self.failure.done():
            self.failure.set_exception(error)

    async def _answers(self, request: CallRequest) -> list[CallAnswer]:
        self._check_number(request)
        prompt = self._prompt(request)
        prefix = prompt.token_ids
        sampling = self._sampling(request, len(prefix))
        identity = hashlib.blake2b(json.dumps([prefix, list(request.stop)]).encode(), digest_size=16).hexdigest()
        self._times_asked[identity] += 1
        first = self._times_asked[identity]
        calls = [
            self._answer(request, prompt, prefix, sampling, self.seed_of(identity, first, number, request.seed or 0))
            for number in range(request.num_answers)
        ]
        return list(await asyncio.gather(*calls))

    def _prompt(self, request: CallRequest) -> Prompt:
        try:
            return self._prompts.prompt(request, self.tree)
        except DataError as error:
            raise CallError(400, f"The messages cannot be rendered: {error}", "invalid_messages", "messages") from error

    def _check_number(self, request: CallRequest) -> None:
        """Count the answers that a request asks for.

        Raises:
            CallError: the program has asked for too many.
        """
        most = self.settings.max_calls
        if self.counts["calls"] + request.num_answers > most:
            self.bound = Ending.MAX_TURNS
            raise CallError(403, f"This key may get {most} answers (max_calls of its environment).", "calls_exhausted")
        self.counts["calls"] += request.num_answers

    async def _answer(
        self, request: CallRequest, prompt: Prompt, prefix: list[int], sampling: SamplingParams, seed: int
    ) -> CallAnswer:
        started = asyncio.get_running_loop().time()
        at = None if prompt.parent is None else prompt.parent.served_by
        try:
            result = await self.parts.generation.generate(GenerationRequest(prefix, sampling, seed, at))
        except GenerationError as error:
            raise CallError(400, f"The engine refuses the prompt: {error}", "invalid_prompt") from error
        self.generation_s += asyncio.get_running_loop().time() - started
        self.counts["prefix_hits"] += at is not None and at == result.served_by
        self._num_tokens += len(result.token_ids)
        self._note_end(request, result)
        return self._record(request, prompt, prefix, result)

    def _note_end(self, request: CallRequest, result: GenerationResult) -> None:
        """Note the bound of the run that has cut an answer off; the program's own limit is not one."""
        asked = request.max_tokens is not None and len(result.token_ids) >= request.max_tokens
        self.bound = Ending.TURN_TOKENS if result.finish_reason == "length" and not asked else None

    def _record(self, request: CallRequest, prompt: Prompt, prefix: list[int], result: GenerationResult) -> CallAnswer:
        """Add an answered call to the tree, and return the answer for the program."""
        number = len(self.tree.calls)
        call_id = f"{_ID}{number}"
        read = self.settings.reader.read(result.token_ids.tolist(), request, call_id)
        end: CallEnd = "tool_calls" if read.tool_calls else ("length" if result.finish_reason == "length" else "stop")
        answer = CallAnswer(
            call_id,
            read.content,
            read.reasoning,
            read.tool_calls,
            end,
            read.stop_string,
            prefix,
            result.token_ids.tolist(),
            result.logprobs.tolist(),
            num_cached_tokens=len(prefix) - prompt.added["token_ids"].numel(),
            token_texts=self._token_texts(result) if request.reads_token_texts else (),
        )
        call = Call(
            call_id,
            number,
            prompt.parent,
            prompt.added,
            _message(answer, result),
            [VersionSpan(*span) for span in result.weight_versions],
            result.served_by,
        )
        self.tree.add(call, request, answer.message)
        return answer

    def _token_texts(self, result: GenerationResult) -> list[str]:
        return [str(self.parts.tokenizer.decode([token])) for token in result.token_ids.tolist()]

    def _sampling(self, request: CallRequest, num_prompt_tokens: int) -> SamplingParams:
        """Return the run's sampling with what the request may change.

        Raises:
            CallError: no token is left for an answer.
        """
        limits, sampling = self.parts.limits, self.parts.sampling
        room = limits.max_sequence_length - num_prompt_tokens
        bound = Ending.SEQUENCE_LENGTH
        if limits.max_episode_tokens is not None and limits.max_episode_tokens - self._num_tokens < room:
            room, bound = limits.max_episode_tokens - self._num_tokens, Ending.EPISODE_TOKENS
        if room <= 0:
            self.bound = bound
            raise CallError(
                400,
                f"The prompt has {num_prompt_tokens} tokens, and the program was given {self._num_tokens}: no token is "
                f"left for an answer (policy.max_total_sequence_length={limits.max_sequence_length}, "
                f"max_episode_tokens={limits.max_episode_tokens}). Shorten the messages.",
                "context_length_exceeded",
                "messages",
            )
        most = min(room, sampling.max_new_tokens, request.max_tokens or sampling.max_new_tokens)
        stops = tuple(dict.fromkeys((*sampling.stop_strings, *request.stop)))
        sampling = replace(sampling, max_new_tokens=most, stop_strings=stops)
        if self.settings.sampling == "run":
            return sampling
        return replace(
            sampling,
            temperature=sampling.temperature if request.temperature is None else request.temperature,
            top_p=sampling.top_p if request.top_p is None else request.top_p,
            top_k=sampling.top_k if request.top_k is None else (request.top_k if request.top_k > 0 else None),
        )


def call_id_of(response_id: str) -> str:
    """Return the id of a call from the id of its response, which dialects begin in ways of their own."""
    return response_id[max(response_id.rfind(_ID), 0) :]


def _message(answer: CallAnswer, result: GenerationResult) -> Message:
    """Return the answer as a message of the log."""
    return {
        **answer.message,
        "token_ids": torch.from_numpy(np.array(result.token_ids, dtype=np.int64)),
        "generation_logprobs": torch.from_numpy(np.array(result.logprobs, dtype=np.float32)),
    }


async def _result(task: "asyncio.Task[list[CallAnswer]]") -> list[CallAnswer]:
    """Wait for a task, which goes on if the client goes away.

    Raises:
        CallError: the request is refused, its sample has ended, or the run fails.
    """
    await asyncio.wait([task])
    if task.cancelled():
        raise CallError(401, "The sample of this key has ended.", "invalid_api_key")
    error = task.exception()
    if error is None or isinstance(error, CallError):
        return task.result()
    raise CallError(500, f"The run cannot answer: {type(error).__name__}.", "engine_failed")


def _was_refused(task: "asyncio.Task[list[CallAnswer]]") -> bool:
    """Return whether a request has ended without answers."""
    return task.done() and (task.cancelled() or task.exception() is not None)
