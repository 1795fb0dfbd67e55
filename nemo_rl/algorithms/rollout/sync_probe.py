"""Check a weight sync by its effect: engines must sample from the policy that is trained.

Receipts prove that the right bytes arrived (`weight_sync.verify`), not that the engine computes with them as the
trainer does. The first batch of a run shows that: both sides compute log-probabilities of the same tokens. The probe
compares them before the first update, and again after an engine was replaced.

    batch ─► policy.get_logprobs ─► error within the limit ─► training
                                  └► beyond: one sample through both models, layer by layer ─► WeightSyncError
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl.algorithms.rollout.refit import Refitter
from nemo_rl.data.stored_rows import STORED_ROWS, stale_of, with_tokens
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.objectives import bounded_exp
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.errors import WeightSyncError

logger = logging.getLogger(__name__)

MAX_COMPARED_TOKENS = 32
_STORED_ROWS_COMPARED = 64
"""Rows whose tokens are fetched for the comparison, where tokens are stored elsewhere."""
ROUNDING = {"float32": 1e-4, "float16": 0.003, "bfloat16": 0.01, "fp8": 0.05}
"""Relative difference of hidden states that rounding can cause in one layer, by number format."""


class SyncProbe:
    """Compares the first batch's log-probabilities on both sides.

    Args:
        refitter: wakes the engines and sends them to sleep where they share a device with the policy.
        max_error: largest mean of `exp(|log p_trainer - log p_engine|)` over the sampled tokens; None: no check.
        timeout_s: limit for the engines to answer.
        precision: the coarser number format of the two sides.
    """

    def __init__(
        self,
        policy: Policy,
        generation: EngineGroup,
        refitter: Refitter,
        max_error: float | None,
        timeout_s: float,
        precision: str,
    ):
        self._policy = policy
        self._generation = generation
        self._refitter = refitter
        self._max_error = max_error
        self._timeout_s = timeout_s
        self._rounding = ROUNDING[precision]
        self._membership: int | None = None

    def check(self, batch: BatchedDataDict[Any], stale_BT: Tensor | None = None) -> None:
        """Compare once; do nothing when these engines have been compared before.

        Only tokens of the current weights are compared. A batch without any leaves the comparison to a later one.

        Args:
            batch: `input_ids`, `input_lengths`, `token_mask` and `generation_logprobs`.
            stale_BT: `[B, T]` bool, tokens that older weights sampled; None if there are none.

        Raises:
            WeightSyncError: the engines compute other log-probabilities than the policy.
        """
        membership = self._generation.membership
        if self._max_error is None or self._membership == membership:
            return
        if STORED_ROWS in batch:
            first = batch.slice(0, _STORED_ROWS_COMPARED)
            batch, stale_BT = with_tokens(first), stale_of(first)
        if stale_BT is not None:
            batch = BatchedDataDict({**batch, "token_mask": batch["token_mask"] * ~stale_BT})
        if not batch["token_mask"].any():
            return
        errors_BT = self._errors(batch)
        error = float(errors_BT.sum() / batch["token_mask"].sum())
        if not error <= self._max_error:
            raise WeightSyncError(self._explanation(batch, errors_BT, error))
        self._membership = membership
        logger.info("Engines sample from the policy: mult_prob_error %.6f in the first batch.", error)

    def _errors(self, batch: BatchedDataDict[Any]) -> Tensor:
        """Compute `exp(|log p_trainer - log p_engine|)` at sampled tokens, 0 elsewhere; `[B, T]`."""
        difference_BT = self._policy.get_logprobs(batch)["logprobs"] - batch["generation_logprobs"]
        return torch.where(batch["token_mask"] > 0, bounded_exp(difference_BT.abs()), 0.0)

    def _explanation(self, batch: BatchedDataDict[Any], errors_BT: Tensor, error: float) -> str:
        row = int((errors_BT.sum(1) / batch["token_mask"].sum(1).clamp(min=1)).argmax())
        length = min(int(batch["input_lengths"][row]), MAX_COMPARED_TOKENS)
        token_ids = batch["input_ids"][row, :length].tolist()
        return (
            f"The engines do not sample from the policy: after the weight sync mult_prob_error is {error:.4g}, at most "
            f"policy.generation.weight_sync.max_mult_prob_error={self._max_error} is allowed; nothing was learned from "
            f"this batch. {self._suspects(token_ids)} Use another engine (policy.generation.backend=hf), the trainer's "
            "precision in the engine (policy.generation.engine.precision), or raise the limit if the difference is "
            "rounding."
        )

    def _suspects(self, token_ids: list[int]) -> str:
        """Name the first layer whose output differs, for each engine, in sentences."""
        self._refitter.ensure_fresh()
        workers = self._generation.workers
        calls = self._generation.call_all("layer_outputs", token_ids)
        of_workers = workers.get_all_worker_results(calls, self._timeout_s, "comparing layers")
        self._refitter.before_training()
        names, of_policy = self._policy.layer_outputs(token_ids)
        return " ".join(
            f"Engine {index}: {suspect_layer(names, of_policy, outputs, self._rounding)}."
            for index, outputs in enumerate(self._generation.of_engines(of_workers))
        )


def suspect_layer(names: Sequence[str], expected: Sequence[Tensor], outputs: Sequence[Tensor], rounding: float) -> str:
    """Name the layer after which the hidden states of two models differ.

    Rounding lets the difference grow slowly; it jumps where a layer computes something else.

    Args:
        names: names of the layers, in order.
        expected: hidden states `[T, D]` after each layer.
        outputs: the same of the suspected model; empty if it cannot report them.
        rounding: relative difference that rounding can cause.
    """
    if [output.shape for output in outputs] != [output.shape for output in expected]:
        return "its layers cannot be compared with the policy's"
    differences = [
        float((output - right).norm() / right.norm().clamp(min=1e-30))
        for output, right in zip(outputs, expected, strict=True)
    ]
    jumps = [now / max(before, rounding) for before, now in zip([0.0, *differences], differences, strict=False)]
    index = max(range(len(names)), key=lambda position: jumps[position])
    if jumps[index] <= 2:
        return "all decoder layers agree, so the final norm or the output head is suspect"
    place = f"{names[index]} or the embeddings before it" if index == 0 else names[index]
    return (
        f"{place} is suspect, its output differs by {differences[index]:.2g} of its size "
        f"({differences[index - 1] if index else 0.0:.2g} before it)"
    )
