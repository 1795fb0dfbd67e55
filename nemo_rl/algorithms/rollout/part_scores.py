"""Keep the scores of a step's parts, so that the whole batch gets them without another forward pass.

    part of a step ─► stages ─► ScoringParts ─► model, the scores are kept
    whole batch    ─► stages ─► KeptScores ───► the kept scores, in the order of the batch's rows

Invariant: a row of the whole batch has the scores that its part was trained with.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nemo_rl.data.model_rows import ROW_INPUTS
from nemo_rl.data.stored_rows import STORED_ROWS, StoredScores
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.interfaces import (
    LogprobOutputSpec,
    ReferenceLogprobOutputSpec,
    ScoringModel,
    TopkLogitsOutputSpec,
)

type RowKey = tuple[bytes, bytes]
"""Token ids of a row, and its further inputs. Equal rows have equal scores."""


@dataclass
class PartScores:
    """Scores of one model, by name and row."""

    rows: dict[str, dict[RowKey, Tensor]] = field(default_factory=dict)
    """For each name of an output, the values of each row without padding."""
    stored: dict[tuple[bool, Any, int], tuple[StoredScores | None, float]] = field(default_factory=dict)
    """For rows in the object store, by `of_reference` and place, what `ScoringModel.keep_logprobs` returned."""

    def clear(self) -> None:
        """Forget all scores."""
        self.rows.clear()
        self.stored.clear()

    def keep[SpecT: Mapping[str, Any]](
        self, data: BatchedDataDict[Any], scored: BatchedDataDict[SpecT]
    ) -> BatchedDataDict[SpecT]:
        """Keep what a model returned for some rows, and return it.

        Args:
            data: the rows: `input_ids` [B, T], `input_lengths` [B].
            scored: tensors [B, T, ...].
        """
        lengths = data["input_lengths"].tolist()
        keys = _keys(data)
        for name, values in scored.items():
            kept = self.rows.setdefault(name, {})
            kept.update((key, values[row, : lengths[row]]) for row, key in enumerate(keys))
        return scored

    def of(self, data: BatchedDataDict[Any], *names: str) -> BatchedDataDict[Any]:
        """Return the kept values of some rows, [B, T, ...], 0 on padding.

        Args:
            data: rows as in `keep`; all of them were kept.
            names: outputs of the model.
        """
        keys, width = _keys(data), data["input_ids"].shape[1]
        outputs: dict[str, Tensor] = {}
        for name in names:
            kept = self.rows[name]
            first = kept[keys[0]]
            values = torch.zeros((len(keys), width, *first.shape[1:]), dtype=first.dtype)
            for row, key in enumerate(keys):
                values[row, : len(kept[key])] = kept[key]
            outputs[name] = values
        return BatchedDataDict(outputs)


def _keys(data: BatchedDataDict[Any]) -> list[RowKey]:
    ids, lengths = data["input_ids"].numpy(), data["input_lengths"].tolist()
    others = data[ROW_INPUTS] if ROW_INPUTS in data else [None] * len(lengths)
    return [
        (ids[row, :length].tobytes(), b"" if other is None else pickle.dumps(other))
        for row, (length, other) in enumerate(zip(lengths, others, strict=True))
    ]


@dataclass(frozen=True)
class ScoringParts:
    """A model that scores the rows of parts; a `ScoringModel`."""

    model: ScoringModel
    """Computes the scores."""
    scores: PartScores
    """Keeps them."""

    def get_logprobs(self, data: BatchedDataDict[Any]) -> BatchedDataDict[LogprobOutputSpec]:
        """See `ScoringModel.get_logprobs`."""
        return self.scores.keep(data, self.model.get_logprobs(data))

    def get_reference_policy_logprobs(self, data: BatchedDataDict[Any]) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """See `ScoringModel.get_reference_policy_logprobs`."""
        return self.scores.keep(data, self.model.get_reference_policy_logprobs(data))

    def get_topk_logits(
        self, data: BatchedDataDict[Any], k: int, *, vocab_size: int | None = None
    ) -> BatchedDataDict[TopkLogitsOutputSpec]:
        """See `ScoringModel.get_topk_logits`."""
        return self.scores.keep(data, self.model.get_topk_logits(data, k, vocab_size=vocab_size))

    def keep_logprobs(
        self, data: BatchedDataDict[Any], *, of_reference: bool = False
    ) -> tuple[list[StoredScores | None], Tensor]:
        """See `ScoringModel.keep_logprobs`."""
        places, errors_B = self.model.keep_logprobs(data, of_reference=of_reference)
        for row, place, error in zip(data[STORED_ROWS], places, errors_B.tolist(), strict=True):
            self.scores.stored[of_reference, row.rows, row.index] = (place, error)
        return places, errors_B


@dataclass(frozen=True)
class KeptScores:
    """The scores of a model for the rows of a whole batch; a `ScoringModel`."""

    scores: PartScores
    """Scores of the batch's parts."""

    def get_logprobs(self, data: BatchedDataDict[Any]) -> BatchedDataDict[LogprobOutputSpec]:
        """See `ScoringModel.get_logprobs`."""
        return self.scores.of(data, "logprobs")

    def get_reference_policy_logprobs(self, data: BatchedDataDict[Any]) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """See `ScoringModel.get_reference_policy_logprobs`."""
        return self.scores.of(data, "reference_logprobs")

    def get_topk_logits(
        self, data: BatchedDataDict[Any], k: int, *, vocab_size: int | None = None
    ) -> BatchedDataDict[TopkLogitsOutputSpec]:
        """See `ScoringModel.get_topk_logits`."""
        return self.scores.of(data, "topk_logits", "topk_indices")

    def keep_logprobs(
        self, data: BatchedDataDict[Any], *, of_reference: bool = False
    ) -> tuple[list[StoredScores | None], Tensor]:
        """See `ScoringModel.keep_logprobs`."""
        kept = [self.scores.stored[of_reference, row.rows, row.index] for row in data[STORED_ROWS]]
        return [place for place, _ in kept], torch.tensor([error for _, error in kept])
