"""Define the interface of generation engines, their requests and their results.

Rollouts call `GenerationInterface` in the controller. Engines implement `Engine` in an actor. Invariant: token ids and
log-probabilities come from the engine and are never computed by tokenising a text again.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypedDict, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_rl.compat.public_names import public_names
from nemo_rl.config import LoraConfig
from nemo_rl.data.model_rows import RowInputs
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.draft.shape import DraftShape
from nemo_rl.models.generation.engine_load import EngineLoad
from nemo_rl.models.generation.remote.chats import ChatAnswer, ChatInput
from nemo_rl.models.quantization import WeightQuantization
from nemo_rl.optimizations.switch import Choice
from nemo_rl.weight_sync.parts import BlocksByName

__getattr__ = public_names(__name__, {"configure_generation_config": "nemo_rl.models.generation.responses"})

FinishReason = Literal["stop", "length", "abort"]
GrammarKind = Literal["json", "regex", "choice", "grammar"]

COLLECT_POLL_S = 60.0
"""Seconds that a worker waits for a result before it returns an empty list."""


class Grammar(NamedTuple):
    """Required form of a response. Tokens that violate it are never drawn."""

    kind: GrammarKind
    """Kind of the definition: "json" (a JSON schema), "regex", "choice" (a JSON list of texts), or "grammar" (EBNF or
    Lark)."""
    definition: str
    """Text of the definition."""


@dataclass(frozen=True)
class SamplingParams:
    """Parameters for sampling one response."""

    temperature: float = 1.0
    """Softmax temperature. 0 means greedy."""
    top_k: int | None = None
    """Number of most likely tokens that can be drawn. If None, all can."""
    top_p: float = 1.0
    """Cumulative probability of the smallest set of tokens that can be drawn (top-p)."""
    max_new_tokens: int = 512
    """Largest number of tokens of the response."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response. The response includes the id that ends it."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a response. The response includes their tokens."""
    bad_words: tuple[str, ...] = ()
    """Texts that the response must not contain. The last token of such a text is never drawn after its other tokens."""
    grammar: Grammar | None = None
    """Required form of the response, or None. Only engines with `accepts_grammars` get one."""
    scores_policy: bool = True
    """Whether log-probabilities of a response with a grammar are those of the policy, without grammar and filters at
    temperature 1, as training needs them. If false, they are those of the sampled distribution."""

    @property
    def draws_from_policy(self) -> bool:
        """Return whether tokens are drawn from the policy's own distribution, apart from the grammar."""
        is_whole = self.top_k is None and self.top_p == 1.0 and not self.bad_words
        return is_whole and self.temperature == 1.0

    @property
    def is_read_again(self) -> bool:
        """Return whether the engine reads the response again to score it, which needs space for one more token."""
        return self.grammar is not None and self.scores_policy


class ServedBy(NamedTuple):
    """The engine that wrote a response."""

    engine: int
    """Index of the engine."""
    num_starts: int
    """Number of engines that were started at this index. Another number means that the engine was replaced."""
    weight_version: int
    """Version of the engine's weights at the end of the response."""


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue once."""

    prompt_token_ids: list[int]
    """All tokens before the response, at least one."""
    sampling: SamplingParams
    """Sampling parameters."""
    seed: int
    """Non-negative 63-bit seed. The response depends only on request, weights and seed, and not on concurrent
    requests."""
    prefix_at: ServedBy | None = None
    """The `served_by` of the previous turn's response, with which the prompt ends. That engine may still have the
    cached keys and values of the prompt. None for a first turn."""
    row_inputs: RowInputs | None = None
    """Inputs of the model besides the tokens. None for most models."""
    chat: ChatInput | None = None
    """The messages of the prompt. Only groups with `GenerationInterface.reads_chats` get them."""
    adapter: str | None = None
    """Name of the adapter that draws the response (`EngineSettings.holds_adapters`). None for the model itself."""


class VersionSpan(NamedTuple):
    """A span of tokens that were sampled with weights of one version."""

    start: int
    """Index of the span's first token. The span ends at the next span or at the end of the response."""
    version: int
    """Version of the weights."""


@dataclass(frozen=True, eq=False)
class GenerationResult:
    """One response.

    Arrays are sent as bytes. At the receiver they may be read-only views of Ray's shared memory, which stays allocated
    as long as the arrays exist.
    """

    token_ids: NDArray[np.int32]
    """[n] response tokens, including the stop token."""
    logprobs: NDArray[np.float32]
    """[n] log-probability of each response token under the distribution that it was drawn from (after bad words,
    temperature, top-k and top-p). For a response with a grammar, see `SamplingParams.scores_policy`. If the policy's
    log-probabilities were requested, the weights `scored_by` computed all of them from the complete response."""
    finish_reason: FinishReason
    """Reason of the end: "stop" (a stop id or string), "length", or "abort" (ended by `Engine.abort`)."""
    weight_versions: list[VersionSpan]
    """Spans from token 0 on, with rising start and version. There are several spans if weights were updated during the
    response. The weights of a token's span compute its log-probability from all earlier tokens. For responses with a
    grammar, see `logprobs`."""
    error: str | None = None
    """Reason why the engine refused the request, which then has no tokens and no spans. None if it was accepted."""
    text: str | None = None
    """Text of the tokens, as `responses.sampled_text` makes it. If None, the receiver decodes the tokens."""
    served_by: ServedBy | None = None
    """The engine that wrote the response. The group of engines sets it."""
    answer: ChatAnswer | None = None
    """The answer, if the group has `GenerationInterface.reads_chats`. Its tokens are not known: `token_ids` are those
    of the tokenizer of `remote.chats`, and `logprobs` are NaN."""
    scored_by: int | None = None
    """Version of the weights that computed all log-probabilities, if the response was read again for them. It is newer
    than `weight_versions` if weights were updated in between."""
    routed_experts: NDArray[np.signedinteger[Any]] | None = None
    """[P + n, L, k] signed integers: the k experts that each of L layers chose for the P prompt tokens and n response
    tokens. They are -1 for a token that the engine did not report, such as the last one. None unless
    `EngineSettings.reports_experts`."""

    @property
    def num_scored_later(self) -> int:
        """Number of tokens whose log-probability was computed by newer weights than those that sampled the token."""
        if self.scored_by is None:
            return 0
        same = (span.start for span in self.weight_versions if span.version == self.scored_by)
        return next(same, len(self.token_ids))

    @classmethod
    def refused(cls, error: str) -> Self:
        """Return the result of a request that can never be served."""
        return cls(np.empty(0, np.int32), np.empty(0, np.float32), "abort", [], error)


@dataclass(frozen=True, eq=False)
class ResponseSoFar:
    """The first part of a response. Its attributes are those of `GenerationResult`."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    weight_versions: list[VersionSpan]

    @classmethod
    def nothing(cls) -> Self:
        """Return a response without tokens."""
        return cls(np.empty(0, np.int32), np.empty(0, np.float32), [])

    def __len__(self) -> int:
        return len(self.token_ids)

    def followed_by(self, rest: "ResponseSoFar | GenerationResult") -> "ResponseSoFar":
        """Join this part with the part that follows it."""
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
    """Load since the last report. None if the engine does not report it."""


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
    """Context limit: largest number of tokens of prompt and response."""
    kv_cache_bytes: int | None = None
    """Size of the key-value cache in bytes. If None, the engine uses `gpu_memory_utilization`."""
    gpu_memory_utilization: float = 0.6
    """Share of GPU memory for the engine."""
    enforce_eager: bool = True
    """Whether graph capture and compilation are disabled."""
    can_sleep: bool = False
    """Whether memory is freed between generation phases (colocated GPUs)."""
    sleep_level: int = 1
    """1 keeps the weights in host memory while the engine sleeps, 2 frees them."""
    load_weights: bool = False
    """Whether the engine loads the checkpoint at the start. If not, the first weight sync provides the weights."""
    seed: int = 0
    """Seed of the engine. Requests have their own seeds."""
    tensor_parallel_size: int = 1
    """Number of ranks that divide each layer of one engine."""
    pipeline_parallel_size: int = 1
    """Number of stages that divide the layers of one engine."""
    expert_parallel_size: int = 1
    """Number of ranks that divide the experts of a layer: 1, or the number of ranks of a stage in all replicas."""
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    """Changes to the model's Hugging Face config."""
    quantization: WeightQuantization | None = None
    """Conversion of weights that are sent in float8. All else has the format `precision`. None without float8."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments for the engine, passed unchanged: `vllm_kwargs`, for vLLM also keys of `vllm_cfg`, and for Megatron
    Core the policy's section `megatron_cfg`."""
    env_vars: dict[str, str] = field(default_factory=dict)
    """Further environment variables of the engine's processes."""
    recomputes_cache: bool = True
    """Whether keys and values of running requests are computed again with new weights."""
    workers_on_machine: int = 1
    """Number of workers of all engines on one machine, which share its cores."""
    samples: int = 0
    """Number of samples per training step for this engine if all engines get equally many. 0 if unknown."""
    optimizations: Choice = "auto"
    """Value of `cluster.optimizations`."""
    reports_experts: bool = False
    """Whether to return the experts that each layer chose for each token (`GenerationResult.routed_experts`)."""
    draft: DraftShape | None = None
    """Sizes of the draft model that is trained with the policy. None without such a model."""
    media_tokens: tuple[int, ...] = ()
    """Ids of the tokens that stand for images, which are never drawn. Empty if the engine reads text only."""
    zero_mismatch: bool = False
    """Whether log-probabilities must have the trainer's bits (`host.row_invariance`)."""
    trainer_ranks: int = 1
    """Number of tensor-parallel ranks of the trainer, whose sums the engine computes with `zero_mismatch`."""
    holds_adapters: bool = False
    """Whether requests may name adapters. The engine then has methods `add_adapter` and `drop_adapter`."""
    max_adapter_rank: int = 64
    """Largest rank of such adapters, for engines that reserve memory for them."""
    lora: LoraConfig | None = None
    """Layers and shape of the adapter that every sync sends in place of all weights. None if all weights are sent."""
    trains_mtp: bool = False
    """Whether the policy's own multi-token-prediction layers propose tokens. Every sync sends these layers."""

    @property
    def num_replicas(self) -> int:
        """The number of replicas in one engine, each with all layers except the experts and with its own requests."""
        return max(1, self.expert_parallel_size // self.tensor_parallel_size)

    @property
    def replica_size(self) -> int:
        """The number of worker processes of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_workers(self) -> int:
        """The number of worker processes of one engine. Each has its own device (`engine_of`)."""
        return self.num_replicas * self.replica_size


def engine_of(rank: int, num_workers: int) -> tuple[int, int]:
    """Return the engine of a worker process. Only this function assigns ranks to engines.

    Args:
        rank: rank of the process among all processes of all engines.
        num_workers: number of processes of one engine.

    Returns:
        The engine's index, and the process's position in the engine. Position 0 receives the engine's requests.
    """
    return divmod(rank, num_workers)


class Engine(Protocol):
    """A continuous-batching engine, called from one asyncio loop and constructed with `EngineSettings` only.

    The protocol does not say where the engine computes: in this process between two calls (`stepped.SteppedEngine`), in
    its own processes, on its own devices, or on a server. A class that reads `GenerationRequest.row_inputs` sets
    `accepts_inputs = True`. Other classes never get requests with such inputs (`registry.engine_rows`). Similarly, only
    a class with `accepts_grammars = True` gets requests with `SamplingParams.grammar`, and only a class with
    `reports_experts = True` is asked for experts (`EngineSettings.reports_experts`).

    An engine whose answers do not depend in any bit on what runs at the same time has `batch_invariant = True`.

    A class may have a method `take_load() -> EngineLoad | None`, and a coroutine function
    `responses_so_far(ids) -> dict[str, ResponseSoFar]`, which returns the tokens sampled so far by those of the
    requests that run, and lets them continue. Without it, a resumed run restarts a checkpoint's unfinished responses.

    A class that serves requests with `GenerationRequest.adapter` has methods `add_adapter(name, AdapterTensors)` and
    `drop_adapter(name)`, which are called between two steps. Requests that run keep an adapter that is dropped.
    """

    def generate(self, request_id: str, request: GenerationRequest) -> Awaitable[GenerationResult]:
        """Accept a request and return an awaitable response.

        Requests of one iteration of the loop are accepted in the order of the calls.

        Raises:
            GenerationError: the request can never be served (when awaited).
            Exception: the engine broke (when awaited).
        """

    async def abort(self, request_ids: Collection[str]) -> None:
        """End requests, whose results are the tokens so far. Ids of finished requests are ignored."""

    async def begin_weight_update(self) -> None:
        """Prepare for new weights. No token is drawn until `finish_weight_update`.

        If the previous update was interrupted, a new one starts.
        """

    async def load_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load some tensors, given by Hugging Face names. They do not change until `finish_weight_update` returns."""

    async def finish_weight_update(self, version: int) -> list[str]:
        """Activate the new weights, and return the names of the engine's parameters that were not loaded.

        Running requests continue with the new weights. Cached keys and values of another version are computed again, as
        if the new weights had read all tokens.
        """

    async def layer_outputs(self, token_ids: list[int]) -> list[torch.Tensor]:
        """Return a prompt's hidden states `[T, D]` float32 after each decoder layer. No request may be running.

        The list is empty or shorter than the number of layers if the engine cannot provide them.
        """

    async def sleep(self) -> None:
        """Free memory until `wake_up`. Do nothing if the engine is asleep."""

    async def wake_up(self) -> None:
        """Allocate memory again. Do nothing if the engine is awake."""


@runtime_checkable
class RecordsReads(Protocol):
    """An `Engine` that reports which parts of its tensors are read in this process."""

    def record_reads(self) -> None:
        """Record the reads of the next weight update."""

    def take_reads(self) -> BlocksByName:
        """Return the parts that were read since `record_reads`, and stop recording."""


class GenerationInterface(ABC):
    """Interface of a group of engines, in the controller."""

    weight_version: int
    reads_chats: ClassVar[bool] = False
    """Whether requests need the messages of their prompts (`GenerationRequest.chat`)."""

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Continue one prompt. Calls may be concurrent. A cancelled call aborts its request in the engine.

        Raises:
            GenerationError: The engine refused the request (too long, unknown token ids).
            WorkerDiedError: Engines died more often than allowed.
            NoAnswerError: An endpoint gave no answer. Only the sample of the request fails.
        """

    async def responses_so_far(self, requests: Sequence[GenerationRequest]) -> list[ResponseSoFar | None]:
        """Return the tokens sampled so far for running requests, which continue.

        Args:
            requests: The same objects that `generate` was called with.

        Returns:
            The response so far for each request, which has no tokens if the group cannot tell. None if the request has
            been answered meanwhile.
        """
        return [ResponseSoFar.nothing() for _ in requests]

    def busy_seconds(self) -> list[float]:
        """Return each engine's seconds with an open request since its start. NaN for an engine that is not running.

        The list is empty if the group does not count them.
        """
        return []

    def open_requests(self) -> list[int]:
        """Return the number of open requests of each engine, or an empty list if the group does not count them."""
        return []

    def load_metrics(self) -> dict[str, float]:
        """Return metrics of the key-value caches since the last call, or none if engines do not report them.

        `num_preemptions` is the sum over the engines. `kv_cache_usage` is the largest share in use.
        `max_running_requests` is the smallest limit of concurrent requests of an engine. With speculative decoding,
        there are also the rates of `engine_load.SpeculationCounts`.
        """
        return {}

    def describe_open(self) -> str:
        """Describe the engines with open requests for an error. Return "" if none are known."""
        return ""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the engines and free their resources."""


class GenerationDatumSpec(TypedDict):
    """Batch of prompts: `input_ids [B, T]` int64 right-padded, `input_lengths [B]`, `stop_strings`, and optionally
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
    """Check that `input_ids` contains only `pad_value` after each row's `input_lengths`.

    Returns:
        True and None, or False and a message that names the first wrong row.

    Raises:
        ValueError: The check fails and `raise_error` is set.
    """
    lengths = data["input_lengths"]
    for row, (ids, length) in enumerate(zip(data["input_ids"], lengths.tolist(), strict=True)):
        if bool((ids[length:] != pad_value).any()):
            message = f"Row {row} has tokens other than {pad_value} after its length {length}."
            if raise_error:
                raise ValueError(message)
            return False, message
    return True, None
