"""Define the interface between a training backend and the worker of its rank.

`policy.workers` calls a backend with `inputs`. `backends` chooses the backend of a configuration. Invariant: a backend
handles tensors, meshes and files. It has no code about losses, advantages or microbatch plans.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.training.inputs import ModelInputs
from nemo_rl.weight_sync.parts import HeldWeights, WholeWeights

ForwardStep = Callable[[int, Tensor, Tensor], Tensor | None]
"""Function from `(microbatch index, logprobs_K, entropy_K)` to a scalar loss, or to None if only scores are needed.

With `ModelInputs.top_k` the tensors are `logits_Kk` and `ids_Kk`.
"""


@dataclass(frozen=True)
class CheckpointPaths:
    """Location of a checkpoint. The backend decides what its folders contain."""

    weights: Path
    """Folder of the weights."""
    optimizer: Path | None = None
    """Folder of the state of optimizer, schedule and random numbers. If None, this state is not written or read."""


class PolicyBackend(ABC):
    """One rank's model, in any training library. Every method is collective over all ranks.

    Args:
        device: Device on which this rank computes. The process group must already exist.
        layout: Position of each rank on the parallel axes.
        init_optimizer: Whether to make optimizer and schedule. A frozen model needs none.
        init_reference_model: Whether to keep the initial weights for reference log-probabilities.
    """

    device: torch.device
    """Device on which this rank computes."""
    shares_prompts: bool = False
    """Whether `run` accepts packed rows with one copy of shared tokens (`shared_prefixes`)."""
    dropped_for: Sequence[str] = ()
    """Names of this rank's tensors that were not finite when `clip_and_step` last dropped an update. Empty if the
    backend does not report names."""
    _whole_weights: tuple[torch.dtype | None, WholeWeights] | None = None

    @abstractmethod
    def __init__(
        self,
        config: PolicyConfig,
        device: torch.device,
        layout: ParallelLayout,
        *,
        init_optimizer: bool,
        init_reference_model: bool,
        seed: int,
    ) -> None: ...

    @abstractmethod
    def run(self, microbatches: Sequence[ModelInputs], forward_step: ForwardStep, *, backward: bool) -> None:
        """Forward each microbatch and pass its scores to `forward_step`. If `backward`, backpropagate its loss.

        Only the last pipeline stage calls `forward_step`. It gets the scores of all K tokens, even if context-parallel
        ranks divide them. Gradients accumulate as a sum over microbatches and data-parallel ranks.
        """

    @abstractmethod
    def clip_and_step(self) -> tuple[float, bool]:
        """Clip gradients and update weights. Return the norm before clipping, and whether the step was taken."""

    def update_metrics(self) -> dict[str, float]:
        """Return the model's own metrics of the training passes of an update, equal on all ranks.

        This is called once, after the passes. By default, there are no metrics.
        """
        return {}

    def weights_here(self) -> dict[str, Tensor]:
        """Return this rank's part of every parameter by name, without copying, for checks for NaN.

        By default, no parameters are returned and checked.
        """
        return {}

    def gradients_here(self) -> dict[str, Tensor]:
        """Return this rank's part of every gradient by parameter name, between `run` and `clip_and_step`.

        By default, the gradients are taken from `weights_here`.
        """
        weights = self.weights_here().items()
        return {name: weight.grad for name, weight in weights if weight.grad is not None}

    def modules_here(self) -> dict[str, nn.Module]:
        """Return the modules of this rank by name, to find modules whose outputs differ between runs.

        By default these are the decoder layers and the modules in them.
        """
        return {
            f"{name}.{inner}".removesuffix("."): module
            for name, layer in self.decoder_layers().items()
            for inner, module in layer.named_modules()
        }

    @abstractmethod
    def advance_schedule(self) -> None:
        """Advance the learning-rate schedule by one training step."""

    @abstractmethod
    def learning_rate(self) -> float:
        """Return the current learning rate."""

    @abstractmethod
    def reference_weights(self) -> AbstractContextManager[None]:
        """Run a block with the reference weights instead of the current weights."""

    @abstractmethod
    def iterate_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield `(name, full tensor)` for every weight and persistent buffer, named as in hub checkpoints.

        Tied weights are yielded once, and all ranks yield the same tensors in the same order. They may share memory.
        """

    def held_weights(self, dtype: torch.dtype | None = None) -> HeldWeights:
        """Return the blocks of this rank of the tensors of `iterate_weights`.

        They allow a rank to gather only the tensors that it sends. By default, whole tensors are taken from
        `iterate_weights`, which is called once more per run to describe them.
        """
        if self._whole_weights is None or self._whole_weights[0] != dtype:
            self._whole_weights = (dtype, WholeWeights(lambda: self.iterate_weights(dtype), self.device))
        return self._whole_weights[1]

    def held_adapters(self, dtype: torch.dtype) -> HeldWeights:
        """Return the blocks of this rank of the matrices of the adapter, for engines that have the base weights.

        Names are those of the parameters in the adapted model. By default, the backend cannot send adapters alone.
        """
        raise NotImplementedError(f"{type(self).__name__} sends merged weights only.")

    @abstractmethod
    def save(self, paths: CheckpointPaths) -> None:
        """Write the weights and, if `paths.optimizer` is set, the rest of the training state."""

    def stage_save(self, paths: CheckpointPaths) -> Callable[[], None]:
        """Copy the state that `save` writes. Return a function that writes it from another thread during training.

        By default, the state is written immediately.
        """
        self.save(paths)
        return lambda: None

    @abstractmethod
    def load(self, paths: CheckpointPaths) -> None:
        """Restore the state that `save` wrote, bit for bit."""

    @abstractmethod
    def decoder_layers(self) -> dict[str, nn.Module]:
        """Return this stage's decoder layers by name, in forward order, to find the layer at which engines differ."""

    def join_tokens(self, hidden_tD: Tensor) -> Tensor:
        """Join a row's hidden states of a layer, `[T, D]` on the CPU, from the ranks' parts of the row."""
        return hidden_tD

    @abstractmethod
    def move_optimizer_state(self, to_host: bool) -> None:
        """Move optimizer state to host memory, to free device memory, or back."""

    @abstractmethod
    def move_weights(self, to_host: bool) -> None:
        """Move the weights of a frozen model to host memory, to free device memory, or back."""
