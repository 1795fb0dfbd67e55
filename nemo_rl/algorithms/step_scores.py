"""Validate process reward models, which score each step of an answer. `rm` builds the runs.

Invariant: a step is predicted to be right if its score is positive, that is, if its probability is above 1/2.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.rewards import StepLossFn


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
