"""Leave the log-probabilities of stored rows in the object store; `models.policy.stored_scores` has the flow."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.mismatch import sequence_errors

if TYPE_CHECKING:
    import ray


class Kept(NamedTuple):
    """Scores of the b rows of a rank."""

    scores: "ray.ObjectRef[Any]"
    """Reference of `[N]` float32, end to end."""
    starts: list[int]
    """Position of each row."""
    errors_B: Tensor
    """`[b]` float32, `sequence_errors` of the rows."""


def keep(rows: BatchedDataDict[Any], scores_BT: Tensor, stale_BT: Tensor | None) -> Kept:
    """Put the scores of a rank's rows into the object store.

    Args:
        rows: the rows with their tokens.
        scores_BT: `[b, T]` float32.
        stale_BT: `[b, T]` bool, tokens that get the log-probabilities of the engine instead; None if there are none.
    """
    import ray  # deferred: see `stored_rows.fetched`

    sampled_BT, counted_BT = rows["generation_logprobs"], rows["token_mask"] * rows["sample_mask"][:, None]
    if stale_BT is not None:
        scores_BT = torch.where(stale_BT, sampled_BT, scores_BT)
    errors_B = sequence_errors(scores_BT[:, 1:], sampled_BT[:, 1:], counted_BT[:, 1:])
    lengths = rows["input_lengths"].tolist()
    flat = np.concatenate([row[:length] for row, length in zip(scores_BT.numpy(), lengths, strict=True)])
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    return Kept(ray.put(flat), starts, errors_B)
