"""Score the rows of one rank, for every training backend. `rank.PolicyWorker` adds methods that change the model.

The score of a token is a log-probability or the output of a scalar head, depending on the model's head. The inputs
define which tokens are scored (`models.training.inputs`). Invariant: all ranks make the same calls of the backend, as
in `rank`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_logprobs import TopK
from nemo_rl.host.device import device_for, to_host
from nemo_rl.models.batch_rows import BatchRows, Kept, StoredRows
from nemo_rl.models.huggingface.layers import recorded_outputs
from nemo_rl.models.training.inputs import (
    InputLayout,
    all_targets,
    build_model_inputs,
    build_score_inputs,
    build_topk_inputs,
    split_rows,
)
from nemo_rl.models.training.interfaces import PolicyBackend


class ScoringWorker:
    """One rank of a model that scores rows.

    Args:
        backend: backend with the model and its mesh.
        layout: layout of microbatches as model inputs.
        gives_scores: whether this rank returns scores (`ParallelLayout.result_ranks`).
    """

    def __init__(self, backend: PolicyBackend, layout: InputLayout, *, gives_scores: bool = True) -> None:
        self.backend = backend
        self._layout = layout
        self._gives_scores = gives_scores

    def get_logprobs(self, data: BatchedDataDict[Any], sizes: Sequence[int]) -> Tensor:
        """Score every token of this rank's rows under the current weights.

        Args:
            data: `input_ids [b, T]` and `input_lengths [b]`, in microbatch order.
            sizes: Number of rows of each microbatch.

        Returns:
            `[b, T]` float32 on the CPU. Position 0 and padding are 0. As in every scoring method, the tensor is empty
            if another rank returns the scores.
        """
        return self._of_tokens(data, sizes)

    def get_values(self, data: BatchedDataDict[Any], sizes: Sequence[int]) -> Tensor:
        """Return the scalar head's output before every token of this rank's rows, for models with such a head.

        Args:
            data: As in `get_logprobs`, or stored rows.
            sizes: Number of rows of each microbatch.

        Returns:
            `[b, T]` float32 on the CPU. Position t has the value of the tokens before t. Position 0 and padding are 0.
        """
        return self._of_tokens(BatchRows.of(data).whole(), sizes)

    def shares_prompts(self) -> bool:
        """Return whether packed rows of this rank may have one copy of tokens that several rows share."""
        return self._layout.packed and self.backend.shares_prompts

    def layer_outputs(self, token_ids: list[int]) -> tuple[list[str], list[Tensor]]:
        """Return the names of the decoder layers, and one sequence's hidden states `[T, D]` float32 after each."""
        rows: BatchedDataDict[Any] = BatchedDataDict(
            {"input_ids": torch.tensor([token_ids]), "input_lengths": torch.tensor([len(token_ids)])}
        )
        layers = self.backend.decoder_layers()
        with recorded_outputs(list(layers.values())) as outputs:
            self.get_logprobs(rows, [1])
        return list(layers), [self.backend.join_tokens(output)[: len(token_ids)] for output in outputs]

    def score(self, data: BatchedDataDict[Any], sizes: Sequence[int]) -> Tensor:
        """Score this rank's whole rows, for reward models only.

        Args:
            data: `input_ids [b, T]` and `input_lengths [b]`, in microbatch order.
            sizes: Number of rows of each microbatch.

        Returns:
            `[b]` float32 on the CPU, or `[b, N]` for a head with N > 1 outputs.
        """
        inputs = [build_score_inputs(rows, self._layout, self.backend.device) for rows in split_rows(data, sizes)]
        scores: list[Tensor] = []

        def forward_step(index: int, scores_K: Tensor, entropy_K: Tensor) -> None:
            scores.append(to_host(scores_K.float()))

        self.backend.run(inputs, forward_step, backward=False)
        return self._given(scores)

    def get_topk_logits(
        self,
        data: BatchedDataDict[Any],
        sizes: Sequence[int],
        k: int,
        vocab_size: int | None = None,
        temperature: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the k largest logits after every token of this rank's rows, under the current weights.

        Args:
            data: `input_ids [b, T]` and `input_lengths [b]`, in microbatch order.
            sizes: Number of rows of each microbatch.
            vocab_size: Only token ids below this number are considered. If None, all are.
            temperature: If given, return log-probabilities at this temperature instead of logits.

        Returns:
            `[b, T, k]` float32 and `[b, T, k]` int64 on the CPU, largest first; 0 on padding.
        """
        top = TopK(k, vocab_size, temperature)
        microbatches = split_rows(data, sizes)
        inputs = [build_topk_inputs(rows, top, self._layout, self.backend.device) for rows in microbatches]
        logits: list[Tensor] = []
        indices: list[Tensor] = []

        def forward_step(index: int, logits_Kk: Tensor, indices_Kk: Tensor) -> None:
            logits.append(to_host(inputs[index].scatter(logits_Kk).float()))
            indices.append(to_host(inputs[index].scatter(indices_Kk)))

        self.backend.run(inputs, forward_step, backward=False)
        return self._given(logits), self._given(indices)

    def get_reference_policy_logprobs(self, data: BatchedDataDict[Any], sizes: Sequence[int]) -> Tensor:
        """Score as `get_logprobs` does, with the initial weights of the run."""
        with self.backend.reference_weights():
            return self.get_logprobs(data, sizes)

    def keep_logprobs(self, data: BatchedDataDict[Any], sizes: Sequence[int], of_reference: bool) -> Kept | None:
        """Score stored rows into the object store. Return None if another rank returns the scores."""
        stored = StoredRows(data)
        rows = stored.whole()
        scores = self.get_reference_policy_logprobs(rows, sizes) if of_reference else self.get_logprobs(rows, sizes)
        return stored.keep(rows, scores) if self._gives_scores else None

    def _of_tokens(self, data: BatchedDataDict[Any], sizes: Sequence[int]) -> Tensor:
        """Return the model's scores for every token that has a predecessor, `[b, T]`."""
        microbatches = list(split_rows(data, sizes))
        inputs = [
            build_model_inputs(rows, all_targets(rows), self._layout, self.backend.device) for rows in microbatches
        ]
        scores: list[Tensor] = []

        def forward_step(index: int, scores_K: Tensor, entropy_K: Tensor) -> None:
            scored = inputs[index].scatter(scores_K).float()
            scores.append(to_host(torch.nn.functional.pad(scored, (1, 0))))

        self.backend.run(inputs, forward_step, backward=False)
        return self._given(scores)

    def _given(self, parts: list[Tensor]) -> Tensor:
        """Join the scores of all microbatches. Return an empty tensor if another rank or stage has the scores."""
        device_for(self.backend.device.type != "cpu").synchronize()
        return torch.cat(parts) if self._gives_scores else torch.empty(0)
