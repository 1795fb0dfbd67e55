"""What a training backend promises to the worker of its rank.

`policy.workers` drives it with `inputs`; `backends` says which one a configuration asks for. Invariant:
a backend knows tensors, meshes and files; it knows no loss, no advantage, no microbatch plan.
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

ForwardStep = Callable[[int, Tensor, Tensor], Tensor | None]
"""`(microbatch index, logprobs_K, entropy_K) -> scalar loss`, or None when only scoring.

With `ModelInputs.top_k` the tensors are `logits_Kk` and `ids_Kk`.
"""


@dataclass(frozen=True)
class CheckpointPaths:
    """Location of a checkpoint; what is in the folders is the backend's own.

    Attributes:
        weights: folder of the weights.
        optimizer: folder of optimizer, schedule and random-number state; None leaves them out.
    """

    weights: Path
    optimizer: Path | None = None


class PolicyBackend(ABC):
    """One rank's model, whatever library trains it. Every method is collective over all ranks.

    Attributes:
        device: where this rank computes.
        shares_prompts: whether `run` takes packed rows that have one copy of a prompt (`shared_prompts`).
        dropped_for: names of this rank's tensors that were not finite and for which `clip_and_step` last dropped an
            update; a backend that does not fill it tells no names.

    Args:
        config: the policy section.
        device: where this rank computes; the process group is up.
        layout: what each of its ranks is there for.
        init_optimizer: make optimizer and schedule (a frozen scorer needs none).
        init_reference_model: keep the initial weights for reference log-probabilities.
        seed: run seed.
    """

    device: torch.device
    shares_prompts: bool = False
    dropped_for: Sequence[str] = ()

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
        """Forward each microbatch, hand its scores to `forward_step`, and back-propagate its loss.

        `forward_step` is called in the last pipeline stage only, with the scores of all K tokens, also where
        context-parallel ranks divide them. Gradients accumulate as a sum over microbatches and data-parallel ranks.
        """

    @abstractmethod
    def clip_and_step(self) -> tuple[float, bool]:
        """Clip, update weights, and return the norm before clipping and whether the step was taken."""

    def update_metrics(self) -> dict[str, float]:
        """What the model itself has to tell about the training passes of an update, equal on all ranks.

        Called once after them. A backend that does not define it has nothing to tell.
        """
        return {}

    def weights_here(self) -> dict[str, Tensor]:
        """This rank's part of every parameter by name, not copied, to see that it is finite.

        A backend that does not define it is not looked at.
        """
        return {}

    @abstractmethod
    def advance_schedule(self) -> None:
        """Move the learning-rate schedule on by one training step."""

    @abstractmethod
    def learning_rate(self) -> float:
        """The current learning rate."""

    @abstractmethod
    def reference_weights(self) -> AbstractContextManager[None]:
        """Run a block with the reference weights in place of the current ones."""

    @abstractmethod
    def iterate_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield `(name, full tensor)` for every weight and persistent buffer, tied ones once, as hub checkpoints do.

        On every rank, in the same order: any of them may be the one that sends.
        """

    @abstractmethod
    def save(self, paths: CheckpointPaths) -> None:
        """Write weights, and with `paths.optimizer` the rest of the training state."""

    def stage_save(self, paths: CheckpointPaths) -> Callable[[], None]:
        """Copy what `save` writes; returns what writes it, which another thread calls while training goes on.

        A backend that does not define it writes at once.
        """
        self.save(paths)
        return lambda: None

    @abstractmethod
    def load(self, paths: CheckpointPaths) -> None:
        """Restore what `save` wrote, bit for bit."""

    @abstractmethod
    def decoder_layers(self) -> dict[str, nn.Module]:
        """The decoder layers of this stage by name, in the order of a forward pass; to find where engines differ."""

    def join_tokens(self, hidden_tD: Tensor) -> Tensor:
        """`[T, D]` on the CPU: what a layer gave for one row, from the tokens that each rank has of it."""
        return hidden_tD

    @abstractmethod
    def move_optimizer_state(self, to_host: bool) -> None:
        """Move optimizer state to host memory to make room on the device, or back."""

    @abstractmethod
    def move_weights(self, to_host: bool) -> None:
        """Move the weights of a frozen model to host memory to make room on the device, or back."""
