"""Describe the predicted memory of a rank that trains, and predict the memory of an engine's rank.

Backends predict a `MemoryPlan` from the `Work` of a rank. Runs show it and compare it with the available memory.
Invariant: only the tensors of a rank are counted. The C library, the communication library and other processes need
additional memory.

`engine_memory` predicts the memory of one rank of an engine from the model's configuration. As in vLLM
(`vllm.v1.worker.gpu_worker.Worker.determine_available_memory`), the key-value cache gets the part of the engine's share
of the device that weights and workspace leave.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from transformers import PretrainedConfig

from nemo_rl.config import GenerationConfig, PolicyConfig
from nemo_rl.models.huggingface.sizes import head_size, parameter_shapes
from nemo_rl.models.quantization import WeightQuantization

WIDE = 4
"""Bytes of a float32."""

type Moment = Mapping[str, float]
"""Bytes in use at one point of a step, by kind of tensor."""


@dataclass(frozen=True)
class Work:
    """The work of a rank, which determines its memory use."""

    tokens: int
    """Number of tokens of a microbatch."""
    several: bool = True
    """Whether an update has more than one microbatch."""
    trains: bool = True
    """Whether there is a backward pass and an optimizer."""
    keeps_reference: bool = False
    """Whether the rank keeps a copy of the initial weights."""
    on_cpu: bool = False
    """Whether the rank computes on the CPU, where device memory is host memory."""
    keys_per_token: int = 1
    """Number of keys that attention holds for each token of a microbatch; above 1 with `shared_prefixes`."""
    scores_rows: bool = False
    """Whether a scalar head gets only the last token of each row (reward model) instead of all tokens (critic)."""


def keys_per_token(policy: PolicyConfig, rows_per_prompt: int) -> int:
    """Return the largest number of keys that attention can allocate per token of a packed microbatch.

    If every sequence has its own prompt, sequences share at most a system prompt, which is assumed to be short.

    Args:
        rows_per_prompt: sequences of a batch that begin with the same prompt, including branches of a sample.
    """
    packing, section = policy.sequence_packing, policy.backend_section
    shares = packing.enabled and packing.share_prompts and policy.backend_key == "dtensor_cfg"
    if not shares or rows_per_prompt == 1 or section.size("cp") > 1 or section.size("pp") > 1:
        return 1
    return packing.max_keys_per_token


def microbatch_tokens(policy: PolicyConfig, *, trains: bool, rows_per_sample: int = 1) -> int:
    """Return the number of tokens of the largest microbatch that a policy section allows.

    Args:
        trains: whether the microbatch is used for training.
        rows_per_sample: number of rows of each sample that `train_micro_batch_size` counts; 2 for pairs.
    """
    for way in (policy.sequence_packing, policy.dynamic_batching):
        if way.enabled:
            return way.train_mb_tokens if trains else way.logprob_mb_tokens
    rows = policy.train_micro_batch_size * rows_per_sample if trains else policy.logprob_batch_size
    return rows * policy.max_total_sequence_length


def microbatches_in_flight(stage: int, stages: int, chunks: int) -> float:
    """Return the number of microbatches whose activations a pipeline stage holds at the same time.

    The number refers to activations of all layers of the stage; interleaved stages hold parts of them. Source:
    Narayanan et al. 2021 (arXiv:2104.04473).

    Args:
        chunks: number of chunks of layers of each stage; above 1 the schedule is interleaved.
    """
    ahead = stages - stage
    if stages == 1 or chunks == 1:
        return float(ahead)
    return ((chunks - 1) * stages + 2 * (ahead - 1) + 1) / chunks


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted memory of one rank, in bytes."""

    stays: Moment
    """Bytes that are always held on the device."""
    moments: Mapping[str, Moment]
    """Additional bytes at each moment of a step, by the name of the moment."""
    host: Moment
    """Bytes in host memory; empty if the rank computes on the CPU."""
    missing: str = ""
    """Text that names memory missing in the numbers; empty if none is known."""

    @property
    def peak_moment(self) -> str:
        """Name of the moment of a step with the most memory in use."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def certain(self) -> float:
        """Bytes that a rank always holds on the device."""
        return sum(self.stays.values())

    @property
    def peak(self) -> float:
        """Largest number of bytes on the device in a step."""
        return self.certain + sum(self.moments[self.peak_moment].values())

    def table(self, title: str) -> str:
        """Format a table in GiB for logs, with one line per kind and one column per moment."""
        kinds = dict.fromkeys(kind for held in self.moments.values() for kind, size in held.items() if size)
        lines = [f"{title}, GiB on each rank (the most is held in the column {self.peak_moment!r}):"]
        lines.append(_line("", self.moments))
        lines += [_line(kind, [_gib(size)] * len(self.moments)) for kind, size in self.stays.items() if size]
        lines += [_line(kind, [_gib(held.get(kind, 0.0)) for held in self.moments.values()]) for kind in kinds]
        lines.append(_line("all", [_gib(self.certain + sum(held.values())) for held in self.moments.values()]))
        if self.host:
            lines.append("  in host memory: " + ", ".join(f"{kind} {_gib(size)}" for kind, size in self.host.items()))
        return "\n".join([*lines, self.missing] if self.missing else lines)


def _line(kind: str, cells: Iterable[str]) -> str:
    return f"  {kind:<34}" + "".join(f"{cell:>20}" for cell in cells)


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g}" if size else "-"


_BATCHED_TOKENS, _SEQUENCES = 16384, 1024
"""Maximum of tokens and sequences in a step of vLLM on devices of at least 70 GiB (`get_batch_defaults`)."""
_WITHOUT_CACHE = ("linear_attention", "conv", "mamba")


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one engine rank."""

    weights: float
    """Bytes of the rank's part of the model."""
    workspace: float
    """Estimated bytes of activations and logits in the largest step."""
    cache_per_token: float
    """Bytes of the keys and values of one token."""


def engine_memory(
    model: PretrainedConfig,
    generation: GenerationConfig,
    itemsize: int,
    quantization: WeightQuantization | None = None,
) -> EngineMemory:
    """Predict the memory of a rank of the engines of a section.

    Args:
        itemsize: bytes of a number in the engine, except for those of a float8 cache.
        quantization: the weights that the engine holds in float8; None if there are none.
    """
    engine, text = generation.engine, model.get_text_config()
    tensor, stages = engine.tensor_parallel_size, engine.pipeline_parallel_size
    weights = 0.0
    for name, shape in parameter_shapes(model).items():
        whole = prod(shape) * itemsize if quantization is None else quantization.bytes_of(name, shape, itemsize)
        shares_experts = engine.expert_parallel_size > 1 and ".experts." in name
        weights += whole / (engine.expert_parallel_size if shares_experts else tensor)
    cached = itemsize if engine.kv_cache_dtype == "auto" else 1
    hidden, width = text.hidden_size, getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return EngineMemory(
        weights=weights / stages,
        workspace=_BATCHED_TOKENS * (2 * width / tensor + 4 * hidden) * itemsize + _SEQUENCES * text.vocab_size * 2 * 4,
        cache_per_token=cached_numbers(text, tensor) * cached / stages,
    )


def cached_numbers(text: Any, tensor: int) -> float:
    """Return how many numbers a rank caches per token: keys and values of its heads in each layer, or one latent."""
    kinds = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
    layers = sum(not kind.startswith(_WITHOUT_CACHE) for kind in kinds)
    if getattr(text, "kv_lora_rank", None):  # every rank caches latent attention's one vector
        return float(layers * (text.kv_lora_rank + text.qk_rope_head_dim))
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return float(layers * 2 * -(-heads // tensor) * head_size(text))
