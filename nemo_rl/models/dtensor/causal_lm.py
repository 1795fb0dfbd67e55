"""A Hugging Face causal language model whose forward returns token log-probabilities.

The decoder body runs to hidden states; the output head then sees only the positions that matter, in
chunks (`distributed.parallel_logprobs`). Both happen inside one module's forward, because FSDP2
gathers the root's parameters (embedding, final norm, head) around exactly that call.

Invariant: parameters keep their Hugging Face names under `hf`, and the log-probabilities are those of the model's own
logits: `has_plain_head` compares the two, on a small twin where the model has no weights yet. For heads that are more
than a linear layer (soft-capping, logit scales) the model's own forward is used.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.distributed.parallel_logprobs import (
    SamplingDensity,
    TopK,
    logprobs_from_logits,
    token_logprobs,
    topk_logits,
    topk_of,
)
from nemo_rl.models.dtensor.parallelize import ShardableModel

logger = logging.getLogger(__name__)


class CausalLMWithLogprobs(ShardableModel):
    """Wraps a Hugging Face model; see the module docstring.

    Attributes:
        hf: the wrapped model; its `named_parameters` are the names to export.
        plain_head: whether the head is a linear layer on the body's last hidden state.
        chunk_size: tokens per chunk of logits; None takes what suits the device.
    """

    def __init__(self, hf: PreTrainedModel, *, plain_head: bool, chunk_size: int | None = None) -> None:
        super().__init__()
        self.hf = hf
        self.plain_head = plain_head
        self.chunk_size = chunk_size

    def forward(
        self,
        model_inputs: dict[str, Any],
        positions_K: Tensor,
        targets_K: Tensor,
        density: SamplingDensity | None = None,
        top_k: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Score target tokens, or find the most likely ones.

        Args:
            model_inputs: the model's keyword arguments; `input_ids` is `[b, T]`, or `[1, N]` packed.
            positions_K: `[K]` indices into the flattened `[b * T]` tokens whose successor is scored.
            targets_K: `[K]` token ids of the successors, or `[K, k]`.
            density: the sampler's temperature and filters; None means the plain softmax.
            top_k: ignore the targets and give the largest logits at each position.

        Returns:
            `(logprobs, entropy_K)`, float32, `logprobs` shaped like the targets; with `top_k`
            `(logits_Kk, ids_Kk)`, float32 and int64, largest first.
        """
        if not self.plain_head:
            return self._score_with_own_forward(model_inputs, positions_K, targets_K, density, top_k)
        hidden = self.hf.base_model(**model_inputs, use_cache=False).last_hidden_state
        hidden_KD = hidden.flatten(0, 1).index_select(0, positions_K)
        head = self.hf.get_output_embeddings()
        if top_k is not None:
            return topk_logits(hidden_KD, head.weight, top_k, bias_V=head.bias, chunk_size=self.chunk_size)
        return token_logprobs(
            hidden_KD, head.weight, targets_K, density=density, bias_V=head.bias, chunk_size=self.chunk_size
        )

    def _score_with_own_forward(
        self,
        model_inputs: dict[str, Any],
        positions_K: Tensor,
        targets_K: Tensor,
        density: SamplingDensity | None,
        top_k: TopK | None,
    ) -> tuple[Tensor, Tensor]:
        logits = self.hf(**model_inputs, use_cache=False).logits
        logits_KV = logits.flatten(0, 1).index_select(0, positions_K)
        if top_k is not None:
            return topk_of(logits_KV, top_k)
        return logprobs_from_logits(logits_KV, targets_K, density=density)


def build_causal_lm(
    hf: PreTrainedModel, *, chunk_size: int | None = None, plain_head: bool | None = None
) -> CausalLMWithLogprobs:
    """Wrap an unsharded model.

    Args:
        hf: the model.
        chunk_size: tokens per chunk of logits; None takes what suits the device.
        plain_head: what `has_plain_head` says of the architecture; None asks it about `hf`, which has its weights then.
    """
    plain = has_plain_head(hf) if plain_head is None else plain_head
    if not plain:
        logger.warning(
            "%s computes its logits with more than a linear head; its own forward is used, which holds "
            "the logits of a whole microbatch in memory.",
            type(hf).__name__,
        )
    return CausalLMWithLogprobs(hf, plain_head=plain, chunk_size=chunk_size)


@torch.no_grad()
def has_plain_head(hf: PreTrainedModel) -> bool:
    """Whether `head(body(x))` equals the model's own logits on a few tokens."""
    head = hf.get_output_embeddings()
    if not isinstance(head, nn.Linear) or hf.base_model is hf:
        return False
    was_training = hf.training
    hf.eval()
    tokens = (torch.arange(8, device=head.weight.device) * 5 + 1)[None] % head.weight.shape[0]
    own = hf(input_ids=tokens, use_cache=False).logits
    ours = head(hf.base_model(input_ids=tokens, use_cache=False).last_hidden_state)
    hf.train(was_training)
    tolerance = 1e-5 * own.abs().max().clamp(min=1e-6).item()
    return own.shape == ours.shape and bool((own - ours).abs().max() <= tolerance)
