"""Direct preference optimisation: learning from pairs of a preferred and a rejected answer.

The loop is `supervised.supervised_train`; here is what makes it DPO: each batch also holds the log-probabilities of the
model that training started from. Invariant: row 2i is the chosen answer of pair i and row 2i + 1 the rejected one, from
the data to the loss.
"""

from dataclasses import dataclass
from typing import Any

from nemo_rl.algorithms.supervised.loop import SupervisedRun, supervised_train
from nemo_rl.config import DPOConfig
from nemo_rl.config import DPOMasterConfig as MasterConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.interfaces import PolicyInterface

__all__ = ["DPOConfig", "MasterConfig", "ReferenceLogprobs", "dpo_train"]


@dataclass(frozen=True)
class ReferenceLogprobs:
    """Adds `reference_policy_logprobs [2P, T]` to a batch.

    Attributes:
        policy: keeps the weights that the run started from.
    """

    policy: PolicyInterface

    def __call__(self, batch: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """The batch with the reference's log-probabilities."""
        scores = self.policy.get_reference_policy_logprobs(batch)
        batch["reference_policy_logprobs"] = scores["reference_logprobs"]
        return batch


def dpo_train(run: SupervisedRun) -> None:
    """Train; see `supervised.supervised_train`."""
    supervised_train(run)
