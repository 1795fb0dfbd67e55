"""Prepare and validate the training of reward models on numbers: scores of answers by attribute, and labels of steps.

`rm` builds the runs. Invariants: the numbers of scores are counted once for the global batch, before the batch is
divided, so the loss does not depend on the division. A step is predicted to be right if its score is positive, that is,
if its probability is above 1/2.

Legend: `R` rows of a validation, `N` attributes, `S` steps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.rewards import RegressionLossFn, StepLossFn

_COLUMNS = ("target_scores", "score_mask", "sample_mask")


@dataclass(frozen=True)
class ScoreCounts:
    """Stage that adds the numbers of scores to a batch (`runtime.run.Stage`)."""

    name = "score_counts"
    roles: tuple[str, ...] = ()

    def apply(self, batch: StepBatch) -> dict[str, float]:
        """Write `score_counts [B, N]`: the number of rows that count and have each score, the same in all rows."""
        batch.tensors["score_counts"] = counts_of(batch.tensors)
        return {}


def counts_of(batch: BatchedDataDict[Any] | dict[str, Tensor]) -> Tensor:
    """Return the number of rows that count and have each score, repeated for each row, `[B, N]` float."""
    mask_BN = batch["score_mask"] * batch["sample_mask"][:, None]
    return mask_BN.sum(0).repeat(len(mask_BN), 1)


class AttributeScorer(Protocol):
    """Interface of a reward model with a score for each attribute."""

    def score(self, data: BatchedDataDict[Any], micro_batch_size: int | None = None) -> BatchedDataDict[Any]:
        """Return `scores [B, N]`, or `[B]` for one attribute."""


@dataclass(frozen=True)
class RegressionValidator:
    """A validation on held-out answers with scores."""

    batches: Iterable[BatchedDataDict[Any]]
    """Validation batches. Each validation iterates over them again."""
    scorer: AttributeScorer
    """The reward model."""
    loss_fn: RegressionLossFn
    """Loss of the training, which is reported for validation too."""
    micro_batch_rows: int | None = None
    """Number of rows of a rank's microbatch. If None, the configured number."""

    def __call__(self, step: int) -> dict[str, float]:
        """Return the loss, and errors and correlations of each attribute, over all rows that have its score."""
        scores: list[Tensor] = []
        columns: dict[str, list[Tensor]] = {name: [] for name in _COLUMNS}
        for batch in self.batches:
            scored = self.scorer.score(batch, self.micro_batch_rows)["scores"].double()
            scores.append(scored.reshape(batch.size, -1))
            for name, found in columns.items():
                found.append(batch[name].double())
        data = {name: torch.cat(found) for name, found in columns.items()}
        data["score_counts"] = counts_of(data)
        scores_RN = torch.cat(scores)
        _, metrics = self.loss_fn(scores_RN, data=data, global_valid_seqs=data["sample_mask"].sum())
        found_metrics = {name: float(value) for name, value in metrics.items()}
        return found_metrics | self._correlations(scores_RN, data)

    def _correlations(self, scores_RN: Tensor, data: dict[str, Tensor]) -> dict[str, float]:
        found = {}
        counts_RN = (data["score_mask"] * data["sample_mask"][:, None]) > 0
        for index, name in enumerate(self.loss_fn.weights):
            rows = counts_RN[:, index]
            mine, wanted = scores_RN[rows, index], data["target_scores"][rows, index]
            found[f"pearson_{name}"] = correlation(mine, wanted)
            found[f"spearman_{name}"] = correlation(ranks(mine), ranks(wanted))
        return found


def correlation(x_R: Tensor, y_R: Tensor) -> float:
    """Return Pearson's correlation, or 0 if it is undefined: fewer than two values, or all values of a side equal.

    Example:
        >>> correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 6.0]))
        1.0
    """
    if len(x_R) < 2 or (x_R == x_R[0]).all() or (y_R == y_R[0]).all():
        return 0.0
    x_R, y_R = x_R.double() - x_R.double().mean(), y_R.double() - y_R.double().mean()
    scale = x_R.norm() * y_R.norm()
    return float((x_R @ y_R / scale).clamp(-1, 1)) if scale > 0 else 0.0


def ranks(values_R: Tensor) -> Tensor:
    """Return the rank of each value, from 1, as float64. Equal values have the mean of their ranks.

    Example:
        >>> ranks(torch.tensor([5.0, 1.0, 5.0])).tolist()
        [2.5, 1.0, 2.5]
    """
    _, index_R, counts = values_R.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[index_R]


def loss_weights(attributes: Sequence[str], weights: dict[str, float]) -> dict[str, float]:
    """Return the weight of each attribute in the loss, in the order of the scores. The default is 1."""
    return {name: weights.get(name, 1.0) for name in attributes}


class StepScorer(Protocol):
    """Interface of a model with a score after each token."""

    def get_values(self, data: BatchedDataDict[Any], micro_batch_size: int | None = None) -> BatchedDataDict[Any]:
        """Return `values [B, T]`. Position t has the score after token t - 1."""


@dataclass(frozen=True)
class StepValidator:
    """A validation on held-out answers with labelled steps."""

    batches: Iterable[BatchedDataDict[Any]]
    """Validation batches. Each validation iterates over them again."""
    scorer: StepScorer
    """The process reward model."""
    loss_fn: StepLossFn
    """Loss of the training, which is reported for validation too."""
    micro_batch_rows: int | None = None
    """Number of rows of a rank's microbatch. If None, the configured number."""

    def __call__(self, step: int) -> dict[str, float]:
        """Return loss and accuracy over all steps, and how often the first wrong step of an answer is found."""
        scores: list[Tensor] = []
        labels: list[Tensor] = []
        for batch in self.batches:
            values_BT = self.scorer.get_values(batch, self.micro_batch_rows)["values"].double()
            counts_BT = batch["token_mask"] * batch["sample_mask"][:, None] > 0
            for row in counts_BT.any(1).nonzero()[:, 0].tolist():
                scores.append(values_BT[row, counts_BT[row]])
                labels.append(batch["step_labels"][row, counts_BT[row]].double())
        metrics = self._of_steps(torch.cat(scores), torch.cat(labels)) if scores else {}
        found = [first_wrong(each > 0) == first_wrong(label > 0) for each, label in zip(scores, labels, strict=True)]
        is_right = [bool((label > 0).all()) for label in labels]
        of_wrong = _share([hit for hit, right in zip(found, is_right, strict=True) if not right])
        of_right = _share([hit for hit, right in zip(found, is_right, strict=True) if right])
        return metrics | {
            "first_error_accuracy": of_wrong,
            "no_error_accuracy": of_right,
            "first_error_f1": 2 * of_wrong * of_right / (of_wrong + of_right) if of_wrong + of_right else 0.0,
            "num_valid_samples": float(len(scores)),
        }

    def _of_steps(self, scores_S: Tensor, labels_S: Tensor) -> dict[str, float]:
        ones_S = torch.ones_like(scores_S)
        data = {
            "sample_mask": torch.ones(1, dtype=scores_S.dtype),
            "token_mask": pad(ones_S[None], (1, 0)),
            "step_labels": pad(labels_S[None], (1, 0)),
        }
        _, metrics = self.loss_fn(scores_S[None], data=data, global_valid_seqs=1, global_valid_toks=len(scores_S))
        return {name: float(value) for name, value in metrics.items()}


def first_wrong(is_right_S: Tensor) -> int:
    """Return the index of the first step that is not right, or the number of steps.

    Example:
        >>> first_wrong(torch.tensor([True, False, False]))
        1
    """
    wrong = (~is_right_S).nonzero()[:, 0]
    return int(wrong[0]) if len(wrong) else len(is_right_S)


def _share(found: Sequence[bool]) -> float:
    return sum(found) / len(found) if found else 0.0
