"""The interface of generation engines, their requests and their results.

Rollouts call `GenerationInterface` in the controller; engines implement `Engine` in an actor. Invariant: token ids and
log-probabilities come from the engine once and are never tokenised again.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypedDict, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_rl.compat.public_names import public_names
from nemo_rl.data.model_rows import RowInputs
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.draft.shape import DraftShape
from nemo_rl.models.generation.engine_load import EngineLoad
from nemo_rl.models.generation.remote.chats import ChatAnswer, ChatInput
from nemo_rl.models.quantization import WeightQuantization
from nemo_rl.optimizations.switch import Choice
from nemo_rl.weight_sync.parts import BlocksByName

__getattr__ = public_names(__name__, {"configure_generation_config": "nemo_rl.models.generation.configure"})

FinishReason = Literal["stop", "length", "abort"]
GrammarKind = Literal["json", "regex", "choice", "grammar"]

COLLECT_POLL_S = 60.0
"""Seconds that a worker waits for a result before it returns an empty list."""


class Grammar(NamedTuple):
    """The form of a response: tokens that would break it are never drawn."""

    kind: GrammarKind
    """Kind of the definition: "json" (a JSON schema), "regex", "choice" (a JSON list of texts), or "grammar" (EBNF or
    Lark)."""
    definition: str
    """Text of that kind."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one response."""

    temperature: float = 1.0
    """Softmax temperature; 0 means greedy."""
    top_k: int | None = None
    """Keep the k most likely tokens, None for all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with this probability mass."""
    max_new_tokens: int = 512
    """Response limit in tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response; the id stays in the response."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a response; their tokens stay in the response."""
    bad_words: tuple[str, ...] = ()
    """Texts that the response may not contain: the last token of one is never drawn after its other tokens."""
    grammar: Grammar | None = None
    """Form of the response; None: any. Only engines with `accepts_grammars` get one."""
    scores_policy: bool = True
    """Log-probabilities of a response with a grammar are those of the policy, without the grammar and at temperature 1
    without any filter, which training needs; False: those of the distribution that was drawn from."""

    @property
    def draws_from_policy(self) -> bool:
        """True if tokens are drawn from the policy's own distribution, but for the grammar."""
        is_whole = self.top_k is None and self.top_p == 1.0 and not self.bad_words
        return is_whole and self.temperature == 1.0

    @property
    def is_read_again(self) -> bool:
        """True if the engine reads a response again to score it, which takes one more token of the context."""
        return self.grammar is not None and self.scores_policy


class ServedBy(NamedTuple):
    """The engine that wrote a response."""

    engine: int
    """Index of the engine."""
    num_starts: int
    """Engines that had run at this index by then; another number means that it was replaced."""
    weight_version: int
    """Version of the weights that it had at the end of the response."""


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue once."""

    prompt_token_ids: list[int]
    """The whole prefix, never empty."""
    sampling: SamplingParams
    """How to sample."""
    seed: int
    """Non-negative 63-bit seed; the same request with the same weights and seed gives the same response, whatever other
    requests run at the same time."""
    prefix_at: ServedBy | None = None
    """The `served_by` of the response that the prompt ends with, in a conversation of several turns; that engine may
    still hold the keys and values of the prompt. None for a first turn."""
    row_inputs: RowInputs | None = None
    """Inputs of the model next to the tokens; None for most models."""
    chat: ChatInput | None = None
    """The messages of the prompt; only for a group with `GenerationInterface.reads_chats`."""


class VersionSpan(NamedTuple):
    """A span of tokens that were sampled with weights of one version."""

    start: int
    """Index of its first token; the span ends at the next span or at the end of the response."""
    version: int
    """Version of the weights."""


@dataclass(frozen=True, eq=False)
class GenerationResult:
    """One response.

    Its arrays are sent as bytes. At the receiver they may be read-only views of Ray's shared memory, which stays
    allocated as long as they exist.
    """

    token_ids: NDArray[np.int32]
    """[n] response tokens, stop token included."""
    logprobs: NDArray[np.float32]
    """[n] log-probability of each response token under the distribution it was drawn from (after bad words,
    temperature, top-k and top-p). With a grammar see `SamplingParams.scores_policy`; the policy's are then all of the
    weights that scored the complete answer, `scored_by`."""
    finish_reason: FinishReason
    """Reason of the end: "stop" (a stop id or string), "length", or "abort" (ended by `Engine.abort`)."""
    weight_versions: list[VersionSpan]
    """Spans from token 0 on, with rising start and version. There are several if weights were updated during the
    response. Each token's log-probability is that of its span's weights, given all earlier tokens; answers with a
    grammar see `logprobs`."""
    error: str | None = None
    """Why the engine refused the request; then there are no tokens and no spans."""
    text: str | None = None
    """Text of the tokens, as `responses.sampled_text` makes it, so that engines decode instead of the controller; None:
    the
    reader decodes."""
    served_by: ServedBy | None = None
    """The engine that wrote it; set by the group of engines."""
    answer: ChatAnswer | None = None
    """The answer of a group with `GenerationInterface.reads_chats`, whose tokens are not known: `token_ids` are those
    of `remote.chats`, and `logprobs` are NaN."""
    scored_by: int | None = None
    """Version of the weights that gave all log-probabilities, if the response was read again; it is newer than
    `weight_versions` where weights were updated before that."""
    routed_experts: NDArray[np.signedinteger[Any]] | None = None
    """[P + n, L, k] signed integers: the k experts that each of L layers chose for the P tokens of the prompt and the n
    of the response, -1 for a token that the engine did not report, such as the last one; None unless
    `EngineSettings.reports_experts`."""

    @property
    def num_scored_later(self) -> int:
        """Number of tokens whose log-probability is of newer weights than the weights that wrote the tokens."""
        if self.scored_by is None:
            return 0
        same = (span.start for span in self.weight_versions if span.version == self.scored_by)
        return next(same, len(self.token_ids))

    @classmethod
    def refused(cls, error: str) -> Self:
        """Make the result of a request that can never be served."""
        return cls(np.empty(0, np.int32), np.empty(0, np.float32), "abort", [], error)


@dataclass(frozen=True, eq=False)
class ResponseSoFar:
    """The first part of a response, with the attributes of `GenerationResult`."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    weight_versions: list[VersionSpan]

    @classmethod
    def nothing(cls) -> Self:
        """Make a response without tokens."""
        return cls(np.empty(0, np.int32), np.empty(0, np.float32), [])

    def __len__(self) -> int:
        return len(self.token_ids)

    def followed_by(self, rest: "ResponseSoFar | GenerationResult") -> "ResponseSoFar":
        """Join this part and the one after it."""
        spans = [VersionSpan(len(self) + start, version) for start, version in rest.weight_versions]
        if self.weight_versions and spans and spans[0].version == self.weight_versions[-1].version:
            spans = spans[1:]
        return ResponseSoFar(
            np.concatenate([self.token_ids, rest.token_ids]).astype(np.int32),
            np.concatenate([self.logprobs, rest.logprobs]).astype(np.float32),
            self.weight_versions + spans,
        )


class Collected(NamedTuple):
    """Report of a worker."""

    results: list[tuple[str, GenerationResult]]
    """Finished requests by id."""
    load: EngineLoad | None = None
    """Since the last report; None if the engine cannot tell."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings from which a worker builds its engine, made by `factory` from the configuration."""

    backend: str
    """A name of `registry.ENGINES`, or the dotted path of a class."""
    model_name: str
    """Local folder or hub id."""
    tokenizer_name: str
    """Local folder or hub id."""
    device: str
    """Device of the engine: "cpu" or "cuda"."""
    precision: str
    """Number format: "float32", "bfloat16" or "float16"."""
    max_model_len: int
    """Context limit in tokens, prompt and response."""
    kv_cache_bytes: int | None = None
    """Key-value cache size; None lets the engine take `gpu_memory_utilization`."""
    gpu_memory_utilization: float = 0.6
    """Share of GPU memory for the engine."""
    enforce_eager: bool = True
    """No graph capture and no compilation."""
    can_sleep: bool = False
    """Whether memory is freed between generation phases (colocated GPUs)."""
    sleep_level: int = 1
    """1 to keep the weights in host memory while asleep, 2 to drop them."""
    load_weights: bool = False
    """Load the checkpoint at the start; False: the first weight sync provides the weights."""
    seed: int = 0
    """Engine seed; requests carry their own."""
    tensor_parallel_size: int = 1
    """Ranks that divide each layer of one engine."""
    pipeline_parallel_size: int = 1
    """Stages that divide the layers of one engine."""
    expert_parallel_size: int = 1
    """Ranks that divide the experts of a layer; 1, or those of a stage in all replicas."""
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    """Changes to the model's Hugging Face config."""
    quantization: WeightQuantization | None = None
    """Weights that arrive in float8; `precision` is that of everything else. None: no weights."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the engine unchanged (`vllm_kwargs`, and for vLLM the keys of `vllm_cfg`; for Megatron Core
    `megatron_cfg`, that section of the policy)."""
    env_vars: dict[str, str] = field(default_factory=dict)
    """Further environment variables of the engine's processes."""
    recomputes_cache: bool = True
    """Compute keys and values of running requests again with new weights."""
    workers_on_machine: int = 1
    """Workers of all engines on one machine, which share its cores."""
    samples: int = 0
    """Samples of a training step that this engine gets, if all engines get as many; 0: not known."""
    optimizations: Choice = "auto"
    """Value of `cluster.optimizations`."""
    reports_experts: bool = False
    """Return the experts that each layer chose for each token (`GenerationResult.routed_experts`)."""
    draft: DraftShape | None = None
    """Sizes of the draft model that is trained with the policy; None: there is none."""
    trains_mtp: bool = False
    """Proposals come from the policy's layers for multi-token prediction, which every sync sends."""

    @property
    def num_replicas(self) -> int:
        """The replicas of the layers other than experts in one engine, each with its own requests."""
        return max(1, self.expert_parallel_size // self.tensor_parallel_size)

    @property
    def replica_size(self) -> int:
        """The worker processes of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_workers(self) -> int:
        """The number of worker processes of one engine, each with its device (see `engine_of`)."""
        return self.num_replicas * self.replica_size


def engine_of(rank: int, num_workers: int) -> tuple[int, int]:
    """Return the engine of a worker process. Only this function defines how engines map to ranks of their group.

    Args:
        rank: rank of the process among all processes of all engines.
        num_workers: number of processes of one engine.

    Returns:
        The engine's index, and the process's position in the engine. Position 0 receives the engine's requests.
    """
    return divmod(rank, num_workers)


class Engine(Protocol):
    """A continuous-batching engine, called from one asyncio loop and constructed with `EngineSettings` only.

    The protocol leaves open where it computes: in this process between two calls (`stepped.SteppedEngine`), in its own
    processes or on its own devices, or on a server. A class that reads `GenerationRequest.row_inputs` sets
    `accepts_inputs = True`; the others never get requests with such inputs (`registry.engine_rows`). Likewise only a
    class with `accepts_grammars = True` gets requests with `SamplingParams.grammar`, and only one with
    `reports_experts = True` is asked for them (`EngineSettings.reports_experts`).

    A class may have a method `take_load() -> EngineLoad | None`, and a coroutine function `responses_so_far(ids) ->
    dict[str, ResponseSoFar]`, which returns the tokens sampled so far for those of the requests that run, and does not
    end them. Without it, a resumed run samples responses that a checkpoint found unfinished from their start.
    """

    def generate(self, request_id: str, request: GenerationRequest) -> Awaitable[GenerationResult]:
        """Accept a request and return an awaitable response.

        Requests of one iteration of the loop are accepted in the order of the calls.

        Raises:
            GenerationError: the request can never be served (when awaited).
            Exception: the engine broke (when awaited).
        """

    async def abort(self, request_ids: Collection[str]) -> None:
        """End requests with the tokens that they have so far. Ids of finished requests are ignored."""

    async def begin_weight_update(self) -> None:
        """Prepare for new weights, and draw no token until `finish_weight_update`.

        If the previous update was interrupted, a new one starts.
        """

    async def load_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load some tensors under Hugging Face names, unchanged until `finish_weight_update` has returned."""

    async def finish_weight_update(self, version: int) -> list[str]:
        """Activate the new weights, and return the engine parameters that received nothing.

        Running requests continue with the new weights, as if these had read all their tokens: cached keys and values of
        another version are computed again.
        """

    async def layer_outputs(self, token_ids: list[int]) -> list[torch.Tensor]:
        """Return a prompt's hidden states `[T, D]` float32 after each decoder layer, while no request runs.

        The list is empty or shorter than the number of layers if the engine cannot provide them.
        """

    async def sleep(self) -> None:
        """Free memory until `wake_up`, or do nothing if the engine is asleep."""

    async def wake_up(self) -> None:
        """Allocate memory again, or do nothing if the engine is awake."""


@runtime_checkable
class RecordsReads(Protocol):
    """An `Engine` that can tell which parts of its tensors this process reads."""

    def record_reads(self) -> None:
        """Record the reads of the next weight update."""

    def take_reads(self) -> BlocksByName:
        """Return what was read since `record_reads`, and stop recording."""


class GenerationInterface(ABC):
    """Controller side of a group of engines."""

    weight_version: int
    reads_chats: ClassVar[bool] = False
    """Whether requests need the messages of their prompts (`GenerationRequest.chat`)."""

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Continue one prompt, also in concurrent calls, and end its request in the engine if the call is cancelled.

        Raises:
            GenerationError: the engine refused the request (too long, unknown token ids).
            WorkerDiedError: engines died more often than allowed.
            NoAnswerError: an endpoint gave no answer; the sample of the request has an error.
        """

    async def responses_so_far(self, requests: Sequence[GenerationRequest]) -> list[ResponseSoFar | None]:
        """Return the tokens sampled so far for running requests, which continue.

        Args:
            requests: the objects that `generate` was called with.

        Returns:
            The response so far for each request, without tokens if the group cannot tell; None if the request has been
            answered meanwhile.
        """
        return [ResponseSoFar.nothing() for _ in requests]

    def busy_seconds(self) -> list[float]:
        """Return for each engine the seconds with an open request since its start, NaN while it does not run.

        The list is empty if the group cannot tell.
        """
        return []

    def open_requests(self) -> list[int]:
        """Return for each engine the requests without an answer now, or no numbers if the group cannot tell."""
        return []

    def load_metrics(self) -> dict[str, float]:
        """Return metrics of the key-value caches since the last call, or none if the engines cannot tell.

        `num_preemptions` is the sum over the engines, `kv_cache_usage` the largest share in use, and
        `max_running_requests` the smallest number of requests that an engine runs at the same time. With speculative
        decoding also the rates of `engine_load.SpeculationCounts`.
        """
        return {}

    def describe_open(self) -> str:
        """Describe the engines with open requests for an error, or return "" if none are known."""
        return ""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the engines and free their resources."""


class GenerationDatumSpec(TypedDict):
    """Batch of prompts: `input_ids [B, T]` int64 right-padded, `input_lengths [B]`, `stop_strings`, and perhaps
    `row_inputs` (list of B `RowInputs`).
    """

    input_ids: torch.Tensor
    input_lengths: torch.Tensor
    stop_strings: list[list[str] | None]


class GenerationOutputSpec(TypedDict):
    """Batch of responses.

    `output_ids [B, T']` prompt and response right-padded; `generation_lengths [B]`;
    `unpadded_sequence_lengths [B]`; `logprobs [B, T']` float32, 0 on prompt and padding; `truncated [B]`.
    """

    output_ids: torch.Tensor
    generation_lengths: torch.Tensor
    unpadded_sequence_lengths: torch.Tensor
    logprobs: torch.Tensor
    truncated: torch.Tensor


def verify_right_padding(
    data: BatchedDataDict[Any], pad_value: int = 0, raise_error: bool = True
) -> tuple[bool, str | None]:
    """Check that `input_ids` holds only `pad_value` after each row's `input_lengths`.

    Returns:
        True and None; or False and a message that names the first wrong row.

    Raises:
        ValueError: it does not, and `raise_error` is set.
    """
    lengths = data["input_lengths"]
    for row, (ids, length) in enumerate(zip(data["input_ids"], lengths.tolist(), strict=True)):
        if bool((ids[length:] != pad_value).any()):
            message = f"Row {row} has tokens other than {pad_value} after its length {length}."
            if raise_error:
                raise ValueError(message)
            return False, message
    return True, None
