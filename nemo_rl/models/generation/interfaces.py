"""What every generation engine offers, and what travels to and from it.

Rollouts call `GenerationInterface` (controller side); backends implement `Engine` (inside an actor). Invariant:
token ids and log-probabilities come from the engine once and are never re-tokenised.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one response.

    Attributes:
        temperature: softmax temperature; 0 means greedy.
        top_k: keep the k most likely tokens, None for all.
        top_p: keep the smallest set of tokens with this probability mass.
        max_new_tokens: response limit in tokens.
        stop_token_ids: ids that end a response; the id stays in the response.
        stop_strings: texts that end a response; their tokens stay in the response.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    max_new_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue once.

    Attributes:
        prompt_token_ids: the whole prefix, never empty.
        sampling: how to sample.
        seed: non-negative 63-bit seed; the same request with the same weights and seed gives the same
            response whatever else runs beside it.
    """

    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True)
class GenerationResult:
    """One response.

    Attributes:
        token_ids: response tokens, stop token included.
        logprobs: log-probability of each response token under the distribution it was drawn from
            (after temperature, top-k and top-p).
        finish_reason: "stop" (a stop id or string) or "length".
        weight_version: version of the weights that wrote it.
        error: why the engine refused the request; then there are no tokens.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_version: int
    error: str | None = None


@dataclass(frozen=True)
class EngineSettings:
    """What a worker needs to build its engine; resolved from the configuration by `factory`.

    Attributes:
        backend: "vllm" or "hf".
        model_name: local folder or hub id.
        tokenizer_name: local folder or hub id.
        device: "cpu" or "cuda".
        precision: "float32", "bfloat16" or "float16".
        max_model_len: context limit in tokens, prompt and response.
        kv_cache_bytes: key-value cache size; None lets the engine take `gpu_memory_utilization`.
        gpu_memory_utilization: share of GPU memory for the engine.
        enforce_eager: no graph capture and no compilation.
        can_sleep: whether memory is given back between generation phases (colocated GPUs).
        load_weights: read the checkpoint at start; False leaves that to the first weight sync.
        seed: engine seed; requests carry their own.
        hf_overrides: changes to the model's Hugging Face config.
        engine_kwargs: passed to the engine as they are (`vllm_kwargs`).
    """

    backend: str
    model_name: str
    tokenizer_name: str
    device: str
    precision: str
    max_model_len: int
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.6
    enforce_eager: bool = True
    can_sleep: bool = False
    load_weights: bool = False
    seed: int = 0
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    engine_kwargs: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """A continuous-batching engine inside its actor; used from one thread only."""

    weight_version: int

    def add_request(self, request_id: str, request: GenerationRequest) -> None:
        """Queue a request; raises `GenerationError` when it can never be served."""

    def has_unfinished(self) -> bool:
        """Whether a queued or running request remains."""

    def step(self) -> list[tuple[str, GenerationResult]]:
        """Advance all running requests by about one token; returns what finished."""

    def begin_weight_update(self) -> None:
        """Get ready to take new weights."""

    def load_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Take some tensors under Hugging Face names."""

    def finish_weight_update(self, version: int) -> list[str]:
        """Put the new weights in force, drop caches; returns engine parameters nothing was loaded into."""

    def layer_outputs(self, token_ids: list[int]) -> list[torch.Tensor]:
        """Hidden states `[T, D]` float32 behind each decoder layer for a prompt, while no request is under way.

        Empty, or fewer than there are layers, where the engine cannot tell.
        """

    def sleep(self) -> None:
        """Give memory back until `wake_up`; nothing to do when it is asleep."""

    def wake_up(self) -> None:
        """Take memory again; nothing to do when it is awake."""


class GenerationInterface(ABC):
    """Controller side of a group of engines."""

    weight_version: int

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Continue one prompt; many calls may be awaited at once.

        Raises:
            GenerationError: the engine refused the request (too long, unknown token ids).
            WorkerDiedError: engines died more often than allowed.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the engines and free their resources."""


class GenerationDatumSpec(TypedDict):
    """Batch of prompts: `input_ids [B, T]` int64 right-padded, `input_lengths [B]`, `stop_strings`."""

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
    """Check that `input_ids` holds only `pad_value` behind each row's `input_lengths`.

    Returns:
        Whether it does, and otherwise a sentence naming the first wrong row.

    Raises:
        ValueError: it does not, and `raise_error` is set.
    """
    lengths = data["input_lengths"]
    for row, (ids, length) in enumerate(zip(data["input_ids"], lengths.tolist(), strict=True)):
        if bool((ids[length:] != pad_value).any()):
            message = f"Row {row} has tokens other than {pad_value} behind its length {length}."
            if raise_error:
                raise ValueError(message)
            return False, message
    return True, None
