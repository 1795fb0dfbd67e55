"""Score rows with a model from the controller: log-probabilities, top-k logits, scores and values.

`lm_policy.Policy` adds training, checkpoints and the start of the ranks. Flow of a call:

    batch ─► plan (data.packing) ─► each data-parallel rank its rows ─► workers ─► gather, reorder
"""

from typing import TYPE_CHECKING, Any

import torch

from nemo_rl.config import PolicyConfig
from nemo_rl.data.model_rows import ROW_INPUTS, completed
from nemo_rl.data.packing import MicrobatchStrategy
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.policy.batching import ShardedBatch, logprob_strategy, scoring_rows, shard_batch
from nemo_rl.models.policy.interfaces import (
    KeptScores,
    LogprobOutputSpec,
    PolicyInterface,
    ReferenceLogprobOutputSpec,
    ScoreOutputSpec,
    TopkLogitsOutputSpec,
    ValueOutputSpec,
)
from nemo_rl.models.policy.rank_calls import RankCalls
from nemo_rl.models.policy.stored_scores import of_rows
from nemo_rl.models.policy.train_results import join_layers

if TYPE_CHECKING:  # the rows that a training backend accepts; only it makes them
    from nemo_rl.models.accepted_rows import AcceptedRows


class ScoringPolicy(PolicyInterface):
    """The calls of a policy that score rows; a subclass sets the attributes."""

    config: PolicyConfig
    layout: ParallelLayout
    """Position of each rank on the parallel axes."""
    ranks: RankCalls
    _accepted: "AcceptedRows"
    _shares_prompts: bool

    @property
    def data_parallel_size(self) -> int:
        """The number of groups of ranks that work on different rows."""
        return self.layout.data_parallel_size

    def get_logprobs(self, data: BatchedDataDict[Any]) -> BatchedDataDict[LogprobOutputSpec]:
        """Score all tokens under the current weights and the sampler's temperature.

        Args:
            data: `input_ids [B, T]` right padded, `input_lengths [B]`; any number of rows.

        Returns:
            `logprobs [B, T]` float32; 0 at position 0 and on padding.
        """
        return BatchedDataDict({"logprobs": self._score("get_logprobs", data)})

    def keep_logprobs(self, data: BatchedDataDict[Any], *, of_reference: bool = False) -> KeptScores:
        """Score stored rows as `get_logprobs` or `get_reference_policy_logprobs`; the scores stay in the store."""
        return of_rows(*self._run_scoring("keep_logprobs", data, None, of_reference=of_reference))

    def layer_outputs(self, token_ids: list[int]) -> tuple[list[str], list[torch.Tensor]]:
        """Return the names of the decoder layers, and one sequence's hidden states `[T, D]` float32 after each."""
        reports: list[tuple[list[str], list[torch.Tensor]]] = self.ranks.everywhere(
            "layer_outputs", "comparing layers", token_ids=token_ids
        )
        return join_layers([reports[rank] for rank in self.layout.stage_ranks])

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Score as `get_logprobs`, under the weights of `config.model_name`; returns `reference_logprobs [B, T]`.

        Raises:
            ConfigError: the policy was made with `init_reference_model=False`.
        """
        scores = self._score("get_reference_policy_logprobs", data, micro_batch_size)
        return BatchedDataDict({"reference_logprobs": scores})

    def get_topk_logits(
        self,
        data: BatchedDataDict[Any],
        k: int,
        micro_batch_size: int | None = None,
        *,
        vocab_size: int | None = None,
    ) -> BatchedDataDict[TopkLogitsOutputSpec]:
        """Return the k largest logits after every token, for distillation; without temperature and sampling filters.

        Args:
            data: `input_ids [B, T]` right padded, `input_lengths [B]`; any number of rows.
            k: number of logits.
            micro_batch_size: rows of one pass of a rank; None forms passes as configured.
            vocab_size: only ids below it are considered (an output head may have more rows than there are tokens).

        Returns:
            `topk_logits [B, T, k]` float32, largest first, and `topk_indices [B, T, k]` int64, in the order of the
            rows. Position t belongs to the token after token t, including the last real position; 0 on padding.
        """
        rows, width = scoring_rows("get_topk_logits", data, self.config)["input_ids"].shape
        if rows == 0:
            empty = torch.zeros((0, width, k))
            return BatchedDataDict({"topk_logits": empty, "topk_indices": empty.long()})
        sharded, parts = self._run_scoring("get_topk_logits", data, micro_batch_size, k=k, vocab_size=vocab_size)
        logits, indices = (sharded.restore(tensors) for tensors in zip(*parts, strict=True))
        return BatchedDataDict({"topk_logits": logits, "topk_indices": indices})

    def score(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ScoreOutputSpec]:
        """Score whole sequences with a reward model.

        Args:
            data: `input_ids [B, T]` right padded, `input_lengths [B]`; any number of rows.
            micro_batch_size: rows of one pass of a rank; None forms passes as configured.

        Returns:
            `scores [B]` float32, each the value of the tokens up to the last one.

        Raises:
            ConfigError: the policy is a language model.
        """
        return BatchedDataDict({"scores": self._score("score", data, micro_batch_size)})

    def get_values(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ValueOutputSpec]:
        """Return what a scalar head says before each token: as `get_logprobs`, for a critic.

        Args:
            data: `input_ids [B, T]` right padded, `input_lengths [B]`, or stored rows; any number of rows.
            micro_batch_size: rows of one pass of a rank; None forms passes as configured.

        Returns:
            `values [B, T]` float32; position t has the value of the state before token t is written, that is, of the
            tokens before t; 0 at position 0 and on padding. `score` gives the value after the last token.

        Raises:
            ConfigError: the policy is a language model.
        """
        return BatchedDataDict({"values": self._score("get_values", data, micro_batch_size)})

    def offload_optimizer(self) -> None:
        """Move optimizer state to host memory, to make room for colocated engines on GPUs."""
        self.ranks.everywhere("move_optimizer_state", "offloading the optimizer", to_host=True)

    def _score(self, method: str, data: BatchedDataDict[Any], micro_batch_size: int | None = None) -> torch.Tensor:
        rows = self._scoring_rows(method, data)
        if rows.size == 0:
            width = rows["input_ids"].shape[1] if "input_ids" in rows else 0
            return torch.zeros((0,) if method == "score" else (0, width), dtype=torch.float32)
        sharded, parts = self._run_scoring(method, data, micro_batch_size)
        return sharded.restore(parts)

    def _scoring_rows(self, method: str, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        return scoring_rows(method, data, self.config)

    def _run_scoring(
        self, method: str, data: BatchedDataDict[Any], micro_batch_size: int | None, **common: Any
    ) -> tuple[ShardedBatch, list[Any]]:
        """Score at least one row on all ranks; return the sharded batch, which restores the order, and the results."""
        strategy = logprob_strategy(self.config, micro_batch_size)
        sharded = self._shard(self._scoring_rows(method, data), strategy)
        if self.config.offload_optimizer_for_logprob:
            self.offload_optimizer()  # until the next update
        return sharded, self.ranks.with_rows(method, sharded, **common)

    def _shard(self, rows: BatchedDataDict[Any], strategy: MicrobatchStrategy, group_size: int = 1) -> ShardedBatch:
        """Divide rows over the ranks.

        Raises:
            ConfigError: the backend does not accept the rows' further inputs.
        """
        if ROW_INPUTS in rows:
            rows = BatchedDataDict(rows.data | {ROW_INPUTS: completed(rows[ROW_INPUTS])})
            self._accepted.require(rows[ROW_INPUTS])
        return shard_batch(rows, self.data_parallel_size, strategy, group_size, shares_prompts=self._shares_prompts)
