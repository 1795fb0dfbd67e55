"""Convert the last stage's hidden states to scores, in GPTModel's public hook `output_processor`.

The vocabulary stays divided over tensor-parallel ranks, and only the logits of one chunk of tokens exist at a time
(`distributed.parallel_logprobs`). Invariant: all ranks of the last stage that share a microbatch get the scores of all
its K tokens. The gradient of each score flows only into the rank that holds the token.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from nemo_rl.distributed.parallel_logprobs import (
    LogitTransform,
    SamplingDensity,
    initial_head,
    scalar_outputs,
    token_logprobs,
    topk_logits,
)
from nemo_rl.distributed.parallel_logprobs.head import OutputHead
from nemo_rl.distributed.ranks.collectives import all_gather, all_reduce, reduce_gradient
from nemo_rl.models.draft.trainer import DraftTrainer
from nemo_rl.models.megatron.inputs import RankInputs
from nemo_rl.models.megatron.parallel import ParallelGroups

if TYPE_CHECKING:
    from nemo_rl.models.megatron.model.mtp import MTPLoss


class ScalarHead(nn.Module):
    """Head of a reward model or critic. It replaces the output layer and returns N numbers per hidden state.

    Tensor-parallel ranks have the whole head and the same hidden states, so its gradient is whole on each rank.

    Args:
        weight_ND: initial values `[N, D]`, which are copied.
    """

    def __init__(self, weight_ND: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_ND.clone())
        """`[N, D]`, named `score.weight` in Hugging Face models."""

    def forward(self, hidden_kD: Tensor) -> Tensor:
        """Return `[k]` scores, or `[k, N]` for N > 1, float32 or wider."""
        return scalar_outputs(hidden_kD, self.weight)


def give_scalar_head(chunks: Sequence[Any], seed: int, num_outputs: int = 1) -> None:
    """Replace the output layer with a new head for scores if this rank has the last stage.

    Args:
        chunks: unwrapped GPTModels that do not share the embedding's weight with the output layer.
        seed: run seed, for the initial values.
        num_outputs: number of scores.
    """
    for chunk in chunks:
        assert not chunk.share_embeddings_and_output_weights, "a scalar head shares no weight with the embedding"
        if chunk.post_process:
            old = chunk.output_layer.weight
            initial = initial_head(chunk.config.hidden_size, seed, num_outputs)
            chunk.output_layer = ScalarHead(initial.to(old.device, old.dtype))


def logit_transform(hf_config: PretrainedConfig) -> LogitTransform:
    """Return the operations that the supported model families apply after the linear head."""
    cap = getattr(hf_config.get_text_config(), "final_logit_softcapping", None)
    return LogitTransform(cap=cap)


class RowScorer:
    """Scores hidden states when GPTModel calls it in the last stage with the `RankInputs` as context.

    Args:
        groups: the ranks that divide tokens and vocabulary.
        density: the density from which the engine samples tokens.
        transform: operations after the linear head.
        chunk_size: tokens per chunk of logits; if None, the device's default.
    """

    def __init__(
        self,
        groups: ParallelGroups,
        density: SamplingDensity,
        transform: LogitTransform | None = None,
        chunk_size: int | None = None,
    ) -> None:
        self._groups, self._density = groups, density
        self._transform = transform or LogitTransform()
        self.head_options: dict[str, Any] = {"transform": self._transform, "group": groups.tp, "chunk_size": chunk_size}
        """Keyword arguments of `token_logprobs` and `topk_logits` that are the same for all microbatches."""
        self.draft: DraftTrainer | None = None
        """Trainer of the draft model, which learns from training passes; None if there is no draft model."""
        self.mtp: MTPLoss | None = None
        """Loss of the multi-token-prediction layers. None if they are not trained."""

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: nn.Module,
        output_weight: Tensor | None,
        context: RankInputs,
        further_states: Sequence[Tensor] = (),
        **ignored: Any,
    ) -> tuple[Tensor, Tensor]:
        """Score one microbatch.

        Args:
            hidden_states: `[t, b, D]`; with sequence parallelism `[t / tp, b, D]`.
            output_weight: the embedding's weight if the head shares it, or None.
            context: the microbatch, with the tokens to score.
            further_states: hidden states of each multi-token-prediction layer, shaped like `hidden_states`.
            **ignored: further arguments of GPTModel.

        Returns:
            `(logprobs_K, entropy_K)`, or `(logits_Kk, ids_Kk)`, or `(scores_K, zeros_K)` of a head for scores, with
            `scores_KN` if it has N > 1 outputs; float32 (float64 for float64 models), ids int64.
        """
        scalar = isinstance(output_layer, ScalarHead)
        hidden_kD = self._hidden(hidden_states, context.positions_k, partial_gradient=not scalar)
        if scalar:
            scores_k = output_layer(hidden_kD)
            return self._of_all(scores_k, context), scores_k.new_zeros(context.num_scores)
        weight: Any = output_layer.weight if output_weight is None else output_weight
        if self.mtp is not None and further_states:
            of_depths = [
                self._hidden(states, tokens.positions_n, partial_gradient=True)
                for states, tokens in zip(further_states, context.further, strict=True)
            ]
            hidden_kD = self.mtp.attached(hidden_kD, of_depths, weight, context.further)
        if self.draft is not None:
            self.draft.learn(hidden_kD, OutputHead(weight, None, self._transform, self._groups.tp))
        how = self.head_options
        if context.top_k is not None:
            first, second = topk_logits(hidden_kD, weight, context.top_k, **how)
        else:
            density = self._density.unfiltered() if context.unfiltered else self._density
            first, second = token_logprobs(hidden_kD, weight, context.targets_k, density=density, **how)
        return self._of_all(first, context), self._of_all(second, context)

    def _hidden(self, hidden_states: Tensor, positions_k: Tensor, *, partial_gradient: bool) -> Tensor:
        """Return the hidden states `[k, D]` at some positions. With `partial_gradient`, backward sums over ranks."""
        if self._groups.sequence_parallel:
            hidden_states = all_gather(hidden_states, 0, self._groups.tp, partial_gradient=partial_gradient)
        hidden_kD = hidden_states.flatten(0, 1).index_select(0, positions_k)
        if partial_gradient and not self._groups.sequence_parallel:
            hidden_kD = reduce_gradient(hidden_kD, self._groups.tp)
        return hidden_kD

    def _of_all(self, values_k: Tensor, context: RankInputs) -> Tensor:
        """Collect the values `[K, ...]` of all context-parallel ranks."""
        if self._groups.cp is None:
            return values_k
        whole = values_k.new_zeros((context.num_scores, *values_k.shape[1:]))
        return all_reduce(whole.index_copy(0, context.places_k, values_k), self._groups.cp)
