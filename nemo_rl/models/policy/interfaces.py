"""What a policy promises to the algorithms, and what a training backend promises to its worker.

`lm_policy.Policy` implements `PolicyInterface`; `workers.dtensor_worker` supplies a `PolicyBackend`, and so does every
later backend. Invariant: a backend knows tensors, meshes and files; it knows no loss, no advantage, no microbatch plan.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor, nn

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.interfaces import AnyLossFunction
from nemo_rl.models.policy.workers.microbatches import ModelInputs


class LogprobOutputSpec(TypedDict):
    """Result of `get_logprobs`."""

    logprobs: Tensor  # [B, T] float32; position t scores token t given tokens < t, position 0 is 0


class ReferenceLogprobOutputSpec(TypedDict):
    """Result of `get_reference_policy_logprobs`."""

    reference_logprobs: Tensor  # [B, T] float32, as LogprobOutputSpec.logprobs


class ScoreOutputSpec(TypedDict):
    """Result of `score`."""

    scores: Tensor  # [B] float32


class TopkLogitsOutputSpec(TypedDict):
    """Result of `get_topk_logits`; position t holds the distribution after token t."""

    topk_logits: Tensor  # [B, T, k] float32, largest first, at temperature 1; 0 on padding
    topk_indices: Tensor  # [B, T, k] int64 token ids; 0 on padding


class TrainResult(TypedDict):
    """Result of one `train` call on U global batches; a batch in which nothing counts makes no optimizer update."""

    loss: Tensor  # [U] float32, loss of each global batch; 0 without an update
    grad_norm: Tensor  # [U] float32, before clipping; 0 without an update and in eval mode
    metrics: dict[str, float]  # one value per name, see `metrics.join_updates`; without any update counts only
    all_mb_metrics: dict[str, list[float]]  # per name, the value of each update


@dataclass
class UpdateResult:
    """What one rank contributes to one optimizer update.

    Attributes:
        loss: this rank's part of the loss; the global loss is the sum over ranks.
        metrics: this rank's part of each metric; sums over ranks, `_min`/`_max` by extreme.
        grad_norm: of the whole model, equal on all ranks.
        lr: learning rate of the update.
        skipped: whether the update was dropped because its gradient was not finite.
    """

    loss: float
    metrics: dict[str, float] = field(default_factory=dict)
    grad_norm: float = 0.0
    lr: float = 0.0
    skipped: bool = False


MODEL_FOLDER = "model"
"""Subfolder of a weights folder that loads with `from_pretrained`."""


@dataclass(frozen=True)
class CheckpointPaths:
    """Location of a checkpoint; the layout of one step is `<step>/policy/{weights,optimizer,tokenizer}`.

    Attributes:
        weights: folder whose `model/` holds safetensors under Hugging Face names and a config.json.
        optimizer: folder of optimizer, schedule and random-number state; None leaves them out.
    """

    weights: Path
    optimizer: Path | None = None


ForwardStep = Callable[[int, Tensor, Tensor], Tensor | None]
"""`(microbatch index, logprobs_K, entropy_K) -> scalar loss`, or None when only scoring.

With `ModelInputs.top_k` the tensors are `logits_Kk` and `ids_Kk`.
"""


class PolicyBackend(Protocol):
    """One rank's model, whatever library trains it. Every method is collective over all ranks."""

    device: torch.device
    dp_rank: int
    dp_size: int

    def run(self, microbatches: Sequence[ModelInputs], forward_step: ForwardStep, *, backward: bool) -> None:
        """Forward each microbatch, hand its scores to `forward_step`, and back-propagate its loss.

        Gradients accumulate as a sum over microbatches and data-parallel ranks.
        """
        ...

    def zero_grad(self) -> None:
        """Forget accumulated gradients."""
        ...

    def clip_and_step(self) -> tuple[float, bool]:
        """Clip, update weights, and return the norm before clipping and whether the step was taken."""
        ...

    def advance_schedule(self) -> None:
        """Move the learning-rate schedule on by one training step."""
        ...

    def learning_rate(self) -> float:
        """The current learning rate."""
        ...

    def reference_weights(self) -> AbstractContextManager[None]:
        """Run a block with the reference weights in place of the current ones."""
        ...

    def decoder_layers(self) -> dict[str, nn.Module]:
        """The decoder layers by name, in the order in which a forward pass calls them."""
        ...

    def iterate_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield `(name, full tensor)` for every weight and persistent buffer, tied ones once, as hub checkpoints do."""
        ...

    def move_optimizer_state(self, to_host: bool) -> None:
        """Move optimizer state to host memory to make room on the device, or back."""
        ...

    def save(self, paths: CheckpointPaths) -> None:
        """Write weights, and with `paths.optimizer` the rest of the training state."""
        ...

    def load(self, paths: CheckpointPaths) -> None:
        """Restore what `save` wrote, bit for bit."""
        ...

    def close(self) -> None:
        """Leave the process group."""
        ...


class PolicyInterface(ABC):
    """The model under training, as algorithms see it."""

    @abstractmethod
    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: AnyLossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> TrainResult:
        """Make one optimizer update per global batch of `gbs` rows, in order."""

    @abstractmethod
    def get_logprobs(self, data: BatchedDataDict[Any]) -> BatchedDataDict[LogprobOutputSpec]:
        """Score every token under the current weights."""

    @abstractmethod
    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Score every token under the weights the run started from."""

    @abstractmethod
    def get_topk_logits(
        self, data: BatchedDataDict[Any], k: int, micro_batch_size: int | None = None
    ) -> BatchedDataDict[TopkLogitsOutputSpec]:
        """The k largest logits after every token, and their ids."""

    @abstractmethod
    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
        consolidated: bool = False,
    ) -> None:
        """Write a checkpoint that `Policy(weights_path=..., optimizer_path=...)` resumes from."""

    @abstractmethod
    def shutdown(self) -> bool:
        """End the workers."""
