"""Log-probabilities of stored rows, which stay in the object store like the rows.

rank: with_tokens ─► scores ─► keep ─► object store ─────────────────► rank: with_tokens
                                 └► references, errors ─► driver: of_rows ─┘
"""

from collections.abc import Sequence

from torch import Tensor

from nemo_rl.data.stored_rows import StoredScores
from nemo_rl.models.policy.batching import ShardedBatch
from nemo_rl.models.policy.workers.kept_scores import Kept


def of_rows(sharded: ShardedBatch, kept: Sequence[Kept]) -> tuple[list[StoredScores | None], Tensor]:
    """Return the scores of the ranks, and the errors `[B]` float32, in the order of the batch's rows."""
    scores = [StoredScores(part.scores, start) for part in kept for start in part.starts]
    order = [int(position) for position in sharded.plan.restore_order[: sharded.num_rows]]
    return [scores[position] for position in order], sharded.restore([part.errors_B for part in kept])
