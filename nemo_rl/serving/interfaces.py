"""Define what the training service asks of its models: adapters on one base model, their updates and their samples.

The server (`serving.service`) orders the requests of its clients and calls `AdapterModels`.
`serving.models` implements it with policy ranks and generation engines.

Invariant: the result of a call depends on its arguments and on the earlier calls for the same adapter only. Other
adapters, and the calls that run at the same time, do not change a bit of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nemo_rl.models.adapters.tensors import AdapterShape
from nemo_rl.models.adapters.training import AdamParams
from nemo_rl.models.generation.interfaces import GenerationResult, SamplingParams
from nemo_rl.utils.errors import NemoRLError, RayDiedError, WorkerDiedError

PROCESS_LOSSES = (WorkerDiedError, RayDiedError)
"""Errors after which no request can be executed until the models are started again."""


@dataclass(frozen=True, eq=False)
class TrainingDatum:
    """One sequence with the inputs of a loss."""

    token_ids: NDArray[np.int32]
    """`[N]` tokens that the model reads."""
    inputs: Mapping[str, NDArray[np.generic]]
    """Named inputs of the loss, each `[N]` or `[N, K]`: `target_tokens` int64, and float32 `weights`, `logprobs`,
    `advantages`, `sequence_ratio_mask`, depending on the loss. Position i belongs to the prediction after token i."""


@dataclass(frozen=True)
class LossSpec:
    """A loss by its name, as clients name it."""

    name: str
    """For example `cross_entropy`."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """For example `clip_low_threshold`. Settings that are absent have the default of the loss."""


@dataclass(frozen=True, eq=False)
class PassResult:
    """Result of a pass over sequences."""

    outputs: list[dict[str, NDArray[np.float32]]]
    """For each sequence in order, at least `logprobs` with the shape of its `target_tokens`."""
    metrics: dict[str, float]
    """Metrics by `name:reduction`, at least `loss:sum`."""


@dataclass(frozen=True)
class ScoreRequest:
    """Choice of scores of the tokens of a prompt."""

    top_k: int = 0
    """Number of most likely tokens to return at each position."""
    targets: NDArray[np.int64] | None = None
    """`[N - 1, K]` further token ids to score: row i at the position after token i. -1 marks an empty cell."""
    last_n: int | None = None
    """Number of last positions to compute. None means all."""


@dataclass(frozen=True, eq=False)
class PromptScores:
    """Log-probabilities of the tokens of a prompt at temperature 1. Position i belongs to token i."""

    logprobs: NDArray[np.float32]
    """`[N]`, NaN at position 0 and at positions that were not requested."""
    top_ids: NDArray[np.int32] | None = None
    """`[N, top_k]` most likely tokens at each position, the most likely first, and 0 in empty cells."""
    top_logprobs: NDArray[np.float32] | None = None
    """`[N, top_k]` their log-probabilities, and -99999 in empty cells."""
    target_logprobs: NDArray[np.float32] | None = None
    """`[N - 1, K]` log-probabilities of `ScoreRequest.targets`, and NaN in empty cells."""


class RequestError(NemoRLError, ValueError):
    """A request of a client that cannot be served. Its text is for the client."""


@dataclass(frozen=True)
class ModelLimits:
    """Limits of the base model."""

    max_context: int
    """Largest number of tokens of a sequence, with its response."""
    vocab_size: int
    """Number of token ids."""
    eos_ids: tuple[int, ...]
    """Token ids that end a response by default."""


class AdapterModels(Protocol):
    """One base model with many adapters.

    Names of adapters are chosen by the caller and are never used again. Calls for one adapter come one after another;
    calls for different adapters may come at the same time, and then wait for each other.

    Errors: `RequestError` if the request is at fault, and its text is for the client. All other errors are the
    server's.
    """

    limits: ModelLimits
    """Limits of the base model."""

    async def create(self, adapter: str, shape: AdapterShape) -> None:
        """Add an adapter with an optimizer."""

    async def run_pass(
        self, adapter: str, data: Sequence[TrainingDatum], loss: LossSpec, *, backward: bool
    ) -> PassResult:
        """Compute a loss, which is a sum over tokens and sequences. With `backward`, add its gradient to the adapter's.

        Without `backward` nothing changes.
        """

    async def update(self, adapter: str, params: AdamParams) -> dict[str, float]:
        """Make one AdamW update with the gradients since the last one, and set them to 0. Return metrics."""

    async def save(self, adapter: str, folder: Path, *, with_optimizer: bool) -> None:
        """Write an adapter as a PEFT folder, and its optimizer state if wanted, into a new folder."""

    async def load(self, adapter: str, folder: Path, *, with_optimizer: bool) -> AdapterShape:
        """Add an adapter with the weights of a folder, and with its optimizer state, or a new one."""

    async def drop(self, adapter: str) -> None:
        """Forget an adapter and free its memory."""

    async def publish(self, adapter: str, sampler: str) -> None:
        """Copy the current weights of an adapter to a sampler, which keeps them whatever happens to the adapter."""

    async def load_sampler(self, sampler: str, folder: Path) -> None:
        """Make a sampler from the adapter of a folder."""

    async def save_sampler(self, sampler: str, folder: Path) -> None:
        """Write the adapter of a sampler as a PEFT folder."""

    async def drop_sampler(self, sampler: str) -> None:
        """Forget a sampler and free its memory."""

    async def sample(
        self, sampler: str | None, prompt: Sequence[int], params: SamplingParams, seed: int
    ) -> GenerationResult:
        """Draw one response. Without a sampler, the base model draws it."""

    async def score(self, sampler: str | None, prompt: Sequence[int], request: ScoreRequest) -> PromptScores:
        """Score the tokens of a prompt, with the model of the training passes."""
