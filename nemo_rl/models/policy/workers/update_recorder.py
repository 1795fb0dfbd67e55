"""Record the computations of one rank in an optimizer update, for `nemo_rl replay`.

    weights before ─► each microbatch: outputs of modules, log-probabilities, loss ─► gradients ─► weights after

Tensors of the model are recorded as fingerprints (`models.training.tensor_checks`). Invariant: recording reads values
of the update and does not change them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.host.device import device_name
from nemo_rl.losses.loss_function import LossMetrics
from nemo_rl.models.training.inputs import ModelInputs
from nemo_rl.models.training.interfaces import PolicyBackend
from nemo_rl.models.training.tensor_checks import BlockFingerprints, Fingerprint, fingerprint, fingerprints_here

ROW_NUMBERS = "row_numbers"
"""Key of a recorded batch with the position of each row in the step, `[B]` int64."""


@dataclass
class RankUpdate:
    """One rank's part of an optimizer update."""

    before: BlockFingerprints = field(default_factory=dict)
    """Weights before the update."""
    gradients: BlockFingerprints = field(default_factory=dict)
    """Gradients after the sums over microbatches and ranks, before clipping."""
    after: BlockFingerprints = field(default_factory=dict)
    """Weights after the update."""
    losses: list[float] = field(default_factory=list)
    """Loss of each microbatch. Only ranks that give scores have losses, metrics and log-probabilities."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    """Metrics of each microbatch's loss."""
    logprobs: list[tuple[list[int], Tensor]] = field(default_factory=list)
    """Positions of the rows in the step, and their log-probabilities `[b, T - 1]` on the CPU, for each microbatch.
    Empty if the loss gets no log-probabilities."""
    modules: list[tuple[str, Fingerprint]] = field(default_factory=list)
    """Name and output of each module call, in the order in which the calls ended."""
    grad_norm: float = 0.0
    """Gradient norm of the whole model."""
    lr: float = 0.0
    model_metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the model itself, such as the auxiliary loss of experts."""
    device: str = ""
    """Name of the device that computed the update."""


class UpdateRecorder:
    """Records the updates of a rank.

    Args:
        backend: Backend that has the weights, the gradients and the modules.
        of_modules: Whether to record the output of each module.
        gives_scores: Whether to record losses, metrics and log-probabilities. Other ranks with the same rows compute
            the same values, and do not record them.
    """

    def __init__(self, backend: PolicyBackend, *, of_modules: bool, gives_scores: bool = True) -> None:
        self._backend = backend
        self._of_modules = of_modules
        self._gives_scores = gives_scores
        self._hooks: list[RemovableHandle] = []
        self._updates: list[RankUpdate] = []

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Record the weights at the start of an update, and the outputs of modules while the block runs the passes."""
        before = self._updates[-1].after if self._updates else fingerprints_here(self._backend.weights_here())
        self._updates.append(RankUpdate(before, device=device_name(self._backend.device)))
        try:
            if self._of_modules:
                self._watch(self._backend.modules_here())
            yield
        finally:
            self.stop_watching()

    def note(self, rows: BatchedDataDict[Any], inputs: ModelInputs, scores: Tensor, loss: Tensor) -> None:
        """Record scores and loss of a microbatch. Filler rows, which have one token, are not recorded."""
        if not self._gives_scores:
            return
        update = self._updates[-1]
        update.losses.append(loss.item())
        if scores.dim() == 1 and scores.numel() == inputs.positions_K.numel() and ROW_NUMBERS in rows:
            real = (rows["input_lengths"] > 1).cpu()
            numbers = rows[ROW_NUMBERS].cpu()[real].tolist()
            update.logprobs.append((numbers, inputs.scatter(scores.detach()).float().cpu()[real]))

    def passes_end(self, metrics: Sequence[LossMetrics]) -> None:
        """Record the gradients before clipping, and the metrics of the microbatches."""
        update = self._updates[-1]
        if self._gives_scores:
            update.metrics = [{name: float(value) for name, value in values.items()} for values in metrics]
        update.gradients = fingerprints_here(self._backend.gradients_here())

    def end(self, grad_norm: float, lr: float, model_metrics: Mapping[str, float]) -> None:
        """Record the weights after the update, the gradient norm, the learning rate and the model's metrics."""
        update = self._updates[-1]
        update.after, update.grad_norm, update.lr = fingerprints_here(self._backend.weights_here()), grad_norm, lr
        update.model_metrics = {name: float(value) for name, value in model_metrics.items()}

    def stop_watching(self) -> None:
        """Remove the hooks of the modules."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def take(self) -> list[RankUpdate]:
        """Return the updates since the last call."""
        updates, self._updates = self._updates, []
        return updates

    def _watch(self, modules: Mapping[str, nn.Module]) -> None:
        for name, module in modules.items():
            self._hooks.append(module.register_forward_hook(self._output_of(name)))

    def _output_of(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = _first_tensor(output)
            if tensor is not None:
                self._updates[-1].modules.append((name, fingerprint(tensor)))

        return record


def _first_tensor(output: Any) -> Tensor | None:
    """Return this rank's part of the first floating-point tensor in a module's output, or None."""
    if isinstance(output, Tensor):
        local: Tensor = output.to_local() if hasattr(output, "to_local") else output
        return local if torch.is_floating_point(local) else None
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, tuple | list):
        return next((found for found in map(_first_tensor, output) if found is not None), None)
    return None
