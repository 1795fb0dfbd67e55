"""Join the ranks' records of optimizer updates (`policy.workers.update_recorder`).

Invariant: the result does not depend on how ranks divide tensors and rows, except `microbatch_losses` and `modules`,
which belong to the microbatches of each rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.workers.loss_calls import reduce_metrics
from nemo_rl.models.policy.workers.update_recorder import RankUpdate
from nemo_rl.models.training.tensor_checks import Fingerprint, joined


@dataclass(frozen=True)
class UpdateRecord:
    """One optimizer update."""

    loss: float
    """Loss of the global batch."""
    metrics: dict[str, float]
    """Metrics of the loss."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    lr: float
    microbatch_losses: list[list[float]]
    """Losses of the microbatches of each data-parallel rank."""
    before: dict[str, Fingerprint]
    """Weights before the update, by name, in the order of the model."""
    gradients: dict[str, Fingerprint]
    """Gradients before clipping."""
    after: dict[str, Fingerprint]
    """Weights after the update."""
    modules: list[list[tuple[str, Fingerprint]]]
    """Name and output of each module call, in order, for each rank. Empty if outputs were not recorded."""
    devices: list[str]
    """Names of the devices of the ranks."""
    logprobs: dict[int, Tensor]
    """Log-probabilities of each row `[T - 1]` that the update computed, by the row's position in the step."""
    model_metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the model itself."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file, without the log-probabilities."""
        named = {key: getattr(self, key) for key in ("before", "gradients", "after")}
        return {
            "loss": self.loss,
            "metrics": self.metrics,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "model_metrics": self.model_metrics,
            "microbatch_losses": self.microbatch_losses,
            "devices": self.devices,
            **{key: {name: each.as_json() for name, each in prints.items()} for key, prints in named.items()},
            "modules": [[[name, *each.as_json()] for name, each in calls] for calls in self.modules],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any], logprobs: dict[int, Tensor]) -> "UpdateRecord":
        """Rebuild a record from the result of `as_json`."""
        named = {
            key: {name: Fingerprint.from_json(each) for name, each in values[key].items()}
            for key in ("before", "gradients", "after")
        }
        modules = [[(call[0], Fingerprint.from_json(call[1:])) for call in calls] for calls in values["modules"]]
        return cls(**(values | named | {"modules": modules, "logprobs": logprobs}))


def start_recording(policy: Policy, *, of_modules: bool) -> None:
    """Let all ranks record their updates until `take_records`."""
    policy.ranks.everywhere("record_updates", "starting to record the step", of_modules=of_modules)


def take_records(policy: Policy) -> list[UpdateRecord]:
    """Stop recording. Return the records since `start_recording`, one per update.

    Raises:
        DeadlineExceededError, WorkerDiedError: a rank does not answer.
    """
    of_ranks: list[list[RankUpdate]] = policy.ranks.everywhere("take_updates", "recording the step")
    return [_joined(list(of_update), policy.layout.result_ranks) for of_update in zip(*of_ranks, strict=True)]


def _joined(of_ranks: Sequence[RankUpdate], result_ranks: Sequence[int]) -> UpdateRecord:
    results = [of_ranks[rank] for rank in result_ranks]
    return UpdateRecord(
        loss=sum(sum(result.losses) for result in results),
        # # Reduced like in ranks and the controller, so that sums have the same order.
        metrics=reduce_metrics([reduce_metrics(result.metrics) for result in results]),
        grad_norm=of_ranks[0].grad_norm,
        lr=of_ranks[0].lr,
        model_metrics=of_ranks[0].model_metrics,
        microbatch_losses=[result.losses for result in results],
        before=joined(update.before for update in of_ranks),
        gradients=joined(update.gradients for update in of_ranks),
        after=joined(update.after for update in of_ranks),
        devices=[update.device for update in of_ranks],
        modules=[update.modules for update in of_ranks],
        logprobs=dict(
            pair for result in results for rows, block in result.logprobs for pair in zip(rows, block, strict=True)
        ),
    )
