"""Join the ranks' results to the result of `Policy.train`."""

import logging
import math

import torch

from nemo_rl.losses.loss_function import AnyLossFunction
from nemo_rl.models.policy.interfaces import TrainResult
from nemo_rl.models.policy.metrics import join_updates, reduce_metrics
from nemo_rl.models.policy.workers.base import UpdateResult
from nemo_rl.models.training.finite import listed

logger = logging.getLogger(__name__)


def join_ranks(parts: list[UpdateResult], valid: tuple[float, float], eval_mode: bool) -> dict[str, float]:
    """Join the metrics of one update over all ranks."""
    joined = reduce_metrics([part.metrics for part in parts]) | parts[0].model_metrics
    joined["loss"] = sum(part.loss for part in parts)
    joined["global_valid_seqs"], joined["global_valid_toks"] = valid
    if not eval_mode:
        joined["lr"] = parts[0].lr
        joined["grad_norm"] = parts[0].grad_norm
        joined["skipped_updates"] = float(parts[0].skipped)
        joined["num_updates"] = float(not parts[0].skipped)
        _warn_of_values(joined, parts[0])
    return joined


def _warn_of_values(update: dict[str, float], rank: UpdateResult) -> None:
    """Warn on the driver if an update's loss, gradient or learning rate is not finite, and name the tensors."""
    numbers = {name: update[name] for name in ("loss", "grad_norm", "lr")}
    if not rank.skipped and all(map(math.isfinite, numbers.values())):
        return
    said = ", ".join(f"{name}={value:g}" for name, value in numbers.items())
    names = f"; not finite: {listed(rank.not_finite)}" if rank.not_finite else ""
    end = "This update is skipped: weights and optimizer are unchanged." if rank.skipped else "The update was made."
    logger.warning("An update is not finite (%s%s). %s", said, names, end)


def train_result(updates: list[dict[str, float]], loss_fn: AnyLossFunction) -> TrainResult:
    """Build the result of all global batches; skipped ones are empty."""
    made = [update for update in updates if update]
    num_skipped = len(updates) - len(made)
    none_made = {} if made else {"num_updates": 0.0}
    metrics = {"global_valid_seqs": 0.0, "global_valid_toks": 0.0, **none_made} | join_updates(made, loss_fn)
    if num_skipped:
        logger.warning(
            "%d of %d updates were skipped: none of their tokens counts in the loss.", num_skipped, len(updates)
        )
        metrics["skipped_updates"] = metrics.get("skipped_updates", 0.0) + num_skipped
    names = list(dict.fromkeys(name for update in made for name in update))
    return TrainResult(
        loss=torch.tensor([update.get("loss", 0.0) for update in updates]),
        grad_norm=torch.tensor([update.get("grad_norm", 0.0) for update in updates]),
        metrics=metrics,
        all_mb_metrics={name: [u[name] for u in made if name in u] for name in names},
    )


def join_layers(of_stages: list[tuple[list[str], list[torch.Tensor]]]) -> tuple[list[str], list[torch.Tensor]]:
    """Join the layers of all pipeline stages in the order of their numbers; a stage may hold several chunks."""
    layers = [pair for names, outputs in of_stages for pair in zip(names, outputs, strict=True)]
    if len(of_stages) > 1:
        # Imported here, because it imports torch.distributed.tensor and everything below it.
        from transformers.core_model_loading import dot_natural_key

        layers.sort(key=lambda pair: dot_natural_key(pair[0]))
    return [name for name, _ in layers], [output for _, output in layers]
