"""Make the calls of one sample's program: render them, sample answers, and keep the calls in a tree.

    answers(request) ─► history in the tree ─► tokens: the parent's, then those of the new messages ─► engines
                                                                                   answer ─► tree, program

Invariants: the program's answers and the records in the tree come from the same tokens. A request that a client repeats
gets the same answers, and is sampled only once.
"""

import asyncio
import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from nemo_rl.agents.dialects.images import ImageReader
from nemo_rl.agents.endpoint.answers import (
    ID_LENGTH,
    AnswerReader,
    ReadAnswer,
    forwarded,
    read_forwarded,
    refusal,
    short_id,
)
from nemo_rl.agents.endpoint.call_tree import Call, CallTree
from nemo_rl.agents.endpoint.calls import CallAnswer, CallEnd, CallError, CallRequest
from nemo_rl.agents.endpoint.exchanges import Answering, Exchange, Exchanges
from nemo_rl.agents.endpoint.forms import with_form
from nemo_rl.agents.endpoint.prompts import Prompt, PromptRenderer
from nemo_rl.data.images.image import IN_ROW
from nemo_rl.data.images.messages import images_of
from nemo_rl.data.interfaces import Message, RowInputs, TokenizerType
from nemo_rl.data.messages.content import TextRules
from nemo_rl.data.routed_experts import note_experts
from nemo_rl.experience.trajectory import Ending, RolloutLimits
from nemo_rl.host.boundary import Boundary
from nemo_rl.models.generation.interfaces import (
    GenerationInterface,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    VersionSpan,
)
from nemo_rl.models.generation.remote.chats import ChatInput
from nemo_rl.utils.errors import ConfigError, DataError, GenerationError, NoAnswerError


@dataclass(frozen=True)
class Grant:
    """Number of tokens that the answers to one request may have."""

    tokens: int
    """Largest number of tokens of each answer."""
    num_answers: int
    bound: Ending | None
    """Limit of the run that an answer with this many tokens has reached, or None if the program has set the number."""

    def applied(self, sampling: SamplingParams, stop: tuple[str, ...]) -> SamplingParams:
        """Return sampling parameters with this number of tokens and with further stop strings."""
        stops = tuple(dict.fromkeys((*sampling.stop_strings, *stop)))
        return replace(sampling, max_new_tokens=self.tokens, stop_strings=stops)


@dataclass
class Budget:
    """Answers and tokens that a program may still request."""

    limits: RolloutLimits
    """Limits of the sample."""
    max_new_tokens: int
    """Largest number of tokens of one answer, as the run sets it."""
    max_calls: int
    """Largest number of answers."""
    num_calls: int = 0
    """Number of granted answers."""
    num_tokens: int = 0
    """Number of tokens of finished answers."""
    num_granted: int = 0
    """Number of tokens that are reserved for answers that are being sampled."""
    bound: Ending | None = None
    """Limit for which the last request was refused, or None if it was granted."""

    def grant(self, request: CallRequest, num_prompt_tokens: int, num_reserved: int = 0) -> Grant:
        """Take the answers of a request out of the budget.

        Args:
            num_reserved: number of tokens of the context that the engine needs in addition to prompt and answer.

        Raises:
            CallError: no answer or no token is left.
        """
        if self.num_calls + request.num_answers > self.max_calls:
            self.bound = Ending.MAX_TURNS
            message = f"This key may get {self.max_calls} answers (max_calls of its environment)."
            raise CallError(403, message, "calls_exhausted")
        tokens_left = {Ending.SEQUENCE_LENGTH: self.limits.max_sequence_length - num_prompt_tokens - num_reserved}
        if self.limits.max_episode_tokens is not None:
            left = self.limits.max_episode_tokens - self.num_tokens - self.num_granted
            tokens_left[Ending.EPISODE_TOKENS] = left // request.num_answers
        bound = min(tokens_left, key=lambda ending: tokens_left[ending])
        if tokens_left[bound] <= 0:
            self.bound = bound
            raise self._no_room(num_prompt_tokens, num_reserved)
        tokens_left[Ending.TURN_TOKENS] = self.max_new_tokens
        bound = min(tokens_left, key=lambda ending: tokens_left[ending])
        is_own = request.max_tokens is not None and request.max_tokens <= tokens_left[bound]
        tokens = min(tokens_left[bound], request.max_tokens or tokens_left[bound])
        self.bound = None
        self.num_calls += request.num_answers
        self.num_granted += tokens * request.num_answers
        return Grant(tokens, request.num_answers, None if is_own else bound)

    def give_back(self, grant: Grant, num_tokens: int) -> None:
        """Replace the reserved tokens of a grant by the actual tokens of its answers.

        Args:
            num_tokens: number of tokens of the answers.
        """
        self.num_granted -= grant.tokens * grant.num_answers
        self.num_tokens += num_tokens

    def _no_room(self, num_prompt_tokens: int, num_reserved: int) -> CallError:
        limits = self.limits
        reserved = f", the engine needs {num_reserved} more for an answer of a demanded form" if num_reserved else ""
        # NeMo Gym's model server recognises a prompt that is too long by the words "context length" in the message.
        return CallError(
            400,
            f"The prompt does not fit into the context length: it has {num_prompt_tokens} tokens{reserved}, and "
            f"the program has {self.num_tokens + self.num_granted} tokens of answers, so none is left for another "
            f"(policy.max_total_sequence_length={limits.max_sequence_length}, "
            f"max_episode_tokens={limits.max_episode_tokens}). Shorten the messages.",
            "context_length_exceeded",
            "messages",
        )


COUNTS = (
    "calls",
    "retries",
    "undelivered",
    "refused",
    "unlike_template",
    "new_trees",
    "constrained_tokens",
    "scored_later_tokens",
)
"""Names of a session's counts for metrics. They count requested answers, repeated requests, answers whose client had
closed the connection, refused requests, histories that the chat template renders differently, trees that were started
for such histories, and tokens of answers with a demanded form."""

_CLOSE_S = 1.0
_THREADS = ThreadPoolExecutor(8, thread_name_prefix="agent-session")
"""Threads on which requests are read and rendered, to keep the event loop free. A session uses one at a time."""

type CallSeed = Callable[..., int]
"""Function that returns the seed of an answer from values that distinguish it from the sample's other answers."""


@dataclass(frozen=True)
class SessionSettings:
    """Settings of the sessions of one environment."""

    reader: AnswerReader
    """Reader of the answers."""
    max_calls: int = 64
    """Largest number of answers that a program may request."""
    max_concurrent_calls: int = 64
    """Largest number of a program's requests that are answered at the same time. Further requests are refused."""
    sampling: Literal["run", "request"] = "run"
    """Whether the temperature, top_p and top_k of requests apply ("request") or always those of the run ("run")."""
    history: Literal["keep", "template"] = "keep"
    """With "keep", a request always continues the tokens of an earlier answer. With "template", it starts a new tree if
    the chat template renders the history differently."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template for requests that do not set these variables."""

    def completed(self, request: CallRequest) -> CallRequest:
        """Return a request with the environment's values for the chat template variables that it does not set."""
        given = {**self.template_kwargs, **request.template_kwargs}
        return replace(request, template_kwargs=given) if self.template_kwargs else request


@dataclass(frozen=True)
class CallParts:
    """Parts of the run that a session uses."""

    generation: GenerationInterface
    tokenizer: TokenizerType
    """Tokenizer that renders and encodes."""
    text_rules: TextRules
    """Rules for control tokens in texts, as in `RolloutRunner`."""
    limits: RolloutLimits
    """Limits of the sample."""
    sampling: SamplingParams
    trains: bool = True
    """Whether the answers are trained, so that their log probabilities have to be those of the policy."""
    row_inputs: RowInputs | None = None
    """Inputs of the sample's row. Requests may name its images by their paths or addresses."""

    def image_reader(self) -> ImageReader:
        """Return a reader of the images of a sample's requests."""
        if images_of(self.tokenizer) is None:
            return ImageReader()
        images = None if self.row_inputs is None else self.row_inputs.images
        named = [] if images is None else [image for image in images.images if image.source != IN_ROW]
        return ImageReader(self.text_rules.images, {image.source: image for image in named})


@dataclass(eq=False)
class AgentSession:
    """Calls of one sample."""

    parts: CallParts
    """Parts of the run that the session uses."""
    settings: SessionSettings
    """Settings of the session's environment."""
    seed_of: CallSeed
    """Function that returns the seeds of answers."""
    tree: CallTree = field(init=False)
    """Calls that were answered."""
    counts: Counter[str] = field(default_factory=Counter)
    """Counts for metrics."""
    failure: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Future that gets an exception if engines can no longer answer. This ends the run."""
    unanswered: str | None = None
    """Reason why the model's server gave no answer or withheld one, or None if all requests were answered."""
    memory: dict[str, Any] = field(init=False)
    """Memory that dialects use between requests."""
    images: ImageReader = field(init=False)
    """Reader of the images of requests."""
    generation_s: float = 0.0
    """Sum of the times in seconds that answers took."""
    exchanges: Exchanges = field(init=False)
    """Requests and their answers."""
    budget: Budget = field(init=False)
    """Remaining tokens and calls of the program."""
    _prompts: PromptRenderer = field(init=False)
    _running: "set[Answering]" = field(default_factory=set)
    _ending: "set[Answering]" = field(default_factory=set)
    """Cancelled calls of an earlier start of the program."""
    _times_asked: Counter[str] = field(init=False)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._begin()

    def begin_again(self) -> None:
        """Forget all calls. The program was started again from the prompt, and equal calls will get equal answers."""
        for task in self._running:
            task.cancel()
        self._ending |= self._running
        self._running = set()
        self._begin()

    def _begin(self) -> None:
        parts, settings = self.parts, self.settings
        longest = parts.limits.max_sequence_length
        self.counts.clear()
        self.tree, self.memory, self._times_asked = CallTree(), {}, Counter()
        self.images = parts.image_reader()
        self.unanswered = None
        self.exchanges = Exchanges(self.counts)
        self.budget = Budget(parts.limits, parts.sampling.max_new_tokens, settings.max_calls)
        self._prompts = PromptRenderer(parts.tokenizer, parts.text_rules, longest, settings.history, self.counts)

    @property
    def bound(self) -> Ending | None:
        """The limit for which a request was refused or a conversation was cut off, or None if there was none."""
        cut = (call.cut_by for call in self.tree.leaves() if call.cut_by is not None)
        return self.budget.bound or next(cut, None)

    def exchange(self, request: CallRequest, identity: str, *, is_retry: bool) -> Exchange:
        """Start to answer a request, or return the earlier exchange if the client repeats a request.

        Args:
            identity: text that is equal for requests with the same content.
            is_retry: whether the client marks the request as repeated.

        Raises:
            CallError: the request is refused.
        """
        return self.exchanges.of(identity, lambda: self._start(self.settings.completed(request)), is_retry=is_retry)

    async def on_thread[T](self, work: Callable[[], T]) -> T:
        """Call a function on a thread. The functions of one session run one after another, in their order."""
        async with self._turn:
            return await asyncio.get_running_loop().run_in_executor(_THREADS, work)

    def token_ids(self, request: CallRequest) -> list[int]:
        """Return the tokens that a request would continue.

        Raises:
            CallError: the messages cannot be rendered, or only another server knows the model's tokens.
        """
        if self.parts.generation.reads_chats:
            raise CallError(
                400, "Only another server has the tokenizer of this model (generation.endpoint).", "unsupported"
            )
        return self._prompt(self.settings.completed(request)).token_ids

    async def close(self) -> None:
        """Refuse further requests, and cancel running calls."""
        self._is_closed = True
        for task in self._running:
            task.cancel()
        ending = self._running | self._ending
        if ending:
            await asyncio.wait(ending, timeout=_CLOSE_S)

    def _start(self, request: CallRequest) -> Answering:
        if self._is_closed:
            raise CallError(401, "The sample of this key has ended.", "invalid_api_key")
        if len(self._running) >= self.settings.max_concurrent_calls:
            self.counts["refused"] += 1
            most = self.settings.max_concurrent_calls
            raise CallError(429, f"{most} requests of this key are being answered; wait for one.", "too_many_requests")
        task = asyncio.create_task(self._answers(request))
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: Answering) -> None:
        self._running.discard(task)
        self._ending.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, CallError):
            self.counts["refused"] += 1
        elif error is not None and not self.failure.done():
            self.failure.set_exception(error)

    async def _answers(self, request: CallRequest) -> list[CallAnswer]:
        chat = forwarded(request) if self.parts.generation.reads_chats else None
        try:
            if chat is None:
                await self.settings.reader.prepare(request)
        except ConfigError as error:
            raise CallError(400, f"The tools cannot be used: {error}", "invalid_tools", "tools") from error
        sampling, prompt, identity = await self.on_thread(lambda: self._prepared(request))
        budget = self.budget
        grant = budget.grant(request, len(prompt.token_ids), int(sampling.is_read_again))
        self.counts["calls"] += request.num_answers
        sampling = grant.applied(sampling, request.stop)
        self._times_asked[identity] += 1
        seeds = [self.seed_of(identity, self._times_asked[identity], number) for number in range(request.num_answers)]
        tasks = [asyncio.ensure_future(self._sampled(prompt, chat, sampling, seed)) for seed in seeds]
        num_tokens = 0
        try:
            results = await asyncio.gather(*tasks)
            num_tokens = sum(len(result.token_ids) for result in results)
        finally:
            for task in tasks:
                task.cancel()
            budget.give_back(grant, num_tokens)
        both = list(zip(seeds, results, strict=True))
        read = await self.on_thread(lambda: [self._read(request, seed, result) for seed, result in both])
        parts = zip(both, read, strict=True)
        return [self._record(request, prompt, grant, seed, result, texts) for (seed, result), texts in parts]

    def _prepared(self, request: CallRequest) -> tuple[SamplingParams, Prompt, str]:
        """Return the sampling parameters of a request, its prompt, and its identity."""
        sampling = self._sampling(request)
        prompt = self._prompt(request)
        return sampling, prompt, _identity(prompt, request)

    def _read(self, request: CallRequest, seed: int, result: GenerationResult) -> tuple[ReadAnswer, list[str]]:
        """Return an answer as text and, if the request asks for it, the text of each of its tokens."""
        written = result.token_ids.tolist()
        if result.answer is not None:
            read = read_forwarded(result.answer, request)
        else:
            read = self.settings.reader.read(written, request, seed)
        decode = self.parts.tokenizer.decode
        return read, [str(decode([token])) for token in written] if request.reads_token_texts else []

    def _prompt(self, request: CallRequest) -> Prompt:
        """Render a request."""
        with Boundary(Exception) as caught:  # templates raise errors of any kind for unexpected messages
            return self._prompts.prompt(request, self.tree)
        error = caught.take()
        reason = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
        raise CallError(400, f"The messages cannot be rendered: {reason}", "invalid_messages", "messages")

    async def _sampled(
        self, prompt: Prompt, chat: ChatInput | None, sampling: SamplingParams, seed: int
    ) -> GenerationResult:
        """Sample one answer."""
        started = asyncio.get_running_loop().time()
        at = None if prompt.parent is None else prompt.parent.served_by
        try:
            inputs = self._prompts.inputs_of(prompt)
            asked = GenerationRequest(prompt.token_ids, sampling, seed, at, inputs, chat)
            result = await self.parts.generation.generate(asked)
        except GenerationError as error:
            has_form = sampling.grammar is not None
            what, code = ("request", "invalid_structured_output") if has_form else ("prompt", "invalid_prompt")
            raise CallError(400, f"The engine refuses the {what}: {error}", code) from error
        except NoAnswerError as error:
            if error.is_too_long:
                self.budget.bound = Ending.SEQUENCE_LENGTH
            elif error.is_withheld or not error.is_refused:
                self.unanswered = str(error)
            raise refusal(error) from error
        self.generation_s += asyncio.get_running_loop().time() - started
        self.counts["prefix_hits"] += at is not None and at == result.served_by
        return result

    def _record(
        self,
        request: CallRequest,
        prompt: Prompt,
        grant: Grant,
        seed: int,
        result: GenerationResult,
        texts: tuple[ReadAnswer, list[str]],
    ) -> CallAnswer:
        """Add an answered call to the tree, and return the answer for the program."""
        call_id, known = short_id("call", seed), result.answer
        written = result.token_ids.tolist()
        read, token_texts = texts
        counted = None if known is None else (known.num_prompt_tokens or 0, known.num_tokens or 0)
        is_cut = result.finish_reason == "length"
        end: CallEnd = "tool_calls" if read.tool_calls else ("length" if is_cut else "stop")
        answer = CallAnswer(
            call_id,
            read.content,
            read.reasoning,
            read.tool_calls,
            end,
            read.stop_string,
            array("i", prompt.token_ids if known is None else ()),
            array("i", written if known is None else ()),
            array("f", result.logprobs.tolist() if known is None else ()),
            num_cached_tokens=len(prompt.token_ids) - prompt.added["token_ids"].numel() if known is None else 0,
            counted=counted,
            token_texts=token_texts,
        )
        call = Call(
            call_id,
            prompt.parent,
            prompt.added,
            _message(answer, result),
            [VersionSpan(*span) for span in result.weight_versions],
            result.served_by,
            is_cut=is_cut,
            cut_by=grant.bound if is_cut else None,
            num_beginning=prompt.num_beginning,
            added_images=prompt.added_images,
        )
        note_experts(call.log, result.routed_experts)
        if request.grammar is not None or request.forced_tool is not None:
            self.counts["constrained_tokens"] += answer.num_tokens
            self.counts["scored_later_tokens"] += result.num_scored_later
        text = self._prompts.text(call.token_ids) if request.prompt is not None else ""
        self.tree.add(call, request, answer.message, text)
        return answer

    def _sampling(self, request: CallRequest) -> SamplingParams:
        """Return the sampling parameters of the run with the request's changes and the form of its answer."""
        sampling = self.parts.sampling
        if self.settings.sampling == "request":
            sampling = replace(
                sampling,
                temperature=sampling.temperature if request.temperature is None else request.temperature,
                top_p=sampling.top_p if request.top_p is None else request.top_p,
                top_k=sampling.top_k if request.top_k is None else (request.top_k if request.top_k > 0 else None),
            )
        return with_form(sampling, request, trains=self.parts.trains, forwards=self.parts.generation.reads_chats)


def _identity(prompt: Prompt, request: CallRequest) -> str:
    """Return a hash of a request's content, which distinguishes a sample's requests and is equal in all runs."""
    asked = (request.seed, request.num_answers, request.max_tokens)
    distribution = (request.temperature, request.top_p, request.top_k)
    form = (request.grammar, request.forced_tool, request.calls_once)
    forms = [form] if request.grammar is not None or request.forced_tool is not None else []
    images = [[image.digest for image in prompt.images]] if prompt.images else []
    content = json.dumps([prompt.token_ids, request.stop, asked, distribution, *forms, *images])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def call_id_of(response_id: str) -> str:
    """Return the id of a call: the id of its response without the prefix, which differs between dialects."""
    return response_id[-ID_LENGTH:]


def _message(answer: CallAnswer, result: GenerationResult) -> Message:
    """Return the answer as a message of the conversation, with its tokens."""
    return {
        **answer.message,
        "token_ids": torch.from_numpy(np.array(result.token_ids, dtype=np.int64)),
        "generation_logprobs": torch.from_numpy(np.array(result.logprobs, dtype=np.float32)),
        **({} if result.answer is None else {"num_tokens": result.answer.num_tokens}),
    }
