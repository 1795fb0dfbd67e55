"""Define the interface between a policy and the algorithms. `lm_policy.Policy` implements it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, TypedDict

from torch import Tensor

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.loss_function import AnyLossFunction
from nemo_rl.models.batch_rows import StoredScores

type KeptScores = tuple[list[StoredScores | None], Tensor]
"""Result of `keep_logprobs`: references of the scores of B rows, and their `sequence_errors` `[B]` float32."""


class LogprobOutputSpec(TypedDict):
    """Result of `get_logprobs`."""

    logprobs: Tensor  # [B, T] float32; position t scores token t given tokens < t, position 0 is 0


class ReferenceLogprobOutputSpec(TypedDict):
    """Result of `get_reference_policy_logprobs`."""

    reference_logprobs: Tensor  # [B, T] float32, as LogprobOutputSpec.logprobs


class ScoreOutputSpec(TypedDict):
    """Result of `score`."""

    scores: Tensor  # [B] float32, or [B, N] for a reward model with N > 1 scores


class ValueOutputSpec(TypedDict):
    """Result of `get_values`."""

    values: Tensor  # [B, T] float32; position t has the value of the tokens < t, position 0 is 0


class TopkLogitsOutputSpec(TypedDict):
    """Result of `get_topk_logits`. Position t has the distribution after token t."""

    topk_logits: Tensor  # [B, T, k] float32, largest first, at temperature 1; 0 on padding
    topk_indices: Tensor  # [B, T, k] int64 token ids; 0 on padding


class TrainResult(TypedDict):
    """Result of one `train` call on U global batches. A batch without counted tokens makes no update."""

    loss: Tensor  # [U] float32, loss of each global batch; 0 without an update
    grad_norm: Tensor  # [U] float32, before clipping; 0 without an update and in eval mode
    metrics: dict[str, float]  # one value per name (`workers.loss_calls.join_updates`); counts alone without an update
    all_mb_metrics: dict[str, list[float]]  # per name, the value of each update


class ScoringModel(Protocol):
    """Interface of a model that scores rows, for the stages of a step. `lm_policy.Policy` implements it."""

    def get_logprobs(self, data: BatchedDataDict[Any]) -> BatchedDataDict[LogprobOutputSpec]:
        """Score every token under the current weights."""

    def get_reference_policy_logprobs(self, data: BatchedDataDict[Any]) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Score every token under the initial weights of the run."""

    def get_topk_logits(
        self, data: BatchedDataDict[Any], k: int, *, vocab_size: int | None = None, temperature: float | None = None
    ) -> BatchedDataDict[TopkLogitsOutputSpec]:
        """Return the k largest logits, or log-probabilities at a temperature, after every token, with their ids."""

    def keep_logprobs(self, data: BatchedDataDict[Any], *, of_reference: bool = False) -> KeptScores:
        """Score stored rows, and keep the scores in the object store."""


class PolicyInterface(ABC):
    """Interface of the model under training, for algorithms."""

    @abstractmethod
    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: AnyLossFunction,
        eval_mode: bool = False,
        gbs: int | Sequence[int] | None = None,
        mbs: int | None = None,
    ) -> TrainResult:
        """Make one optimizer update per global batch of `gbs` rows, which may be a list with the rows of each batch."""

    @abstractmethod
    def get_logprobs(self, data: BatchedDataDict[Any]) -> BatchedDataDict[LogprobOutputSpec]:
        """Score every token under the current weights."""

    @abstractmethod
    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Score every token under the initial weights of the run."""

    @abstractmethod
    def keep_logprobs(self, data: BatchedDataDict[Any], *, of_reference: bool = False) -> KeptScores:
        """Score stored rows, and keep the scores in the object store."""

    @abstractmethod
    def get_topk_logits(
        self, data: BatchedDataDict[Any], k: int, micro_batch_size: int | None = None
    ) -> BatchedDataDict[TopkLogitsOutputSpec]:
        """Return the k largest logits after every token, with their ids."""

    @abstractmethod
    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
        consolidated: bool = False,
    ) -> None:
        """Write a checkpoint from which `Policy(weights_path=..., optimizer_path=...)` resumes."""

    @abstractmethod
    def shutdown(self) -> bool:
        """End the workers."""


ColocatablePolicyInterface = PolicyInterface
"""NeMo RL's name for a policy that can share devices with engines, as every policy of this library can."""
