"""Compute token log-probabilities and entropies from hidden states, without the `[N, V]` logits in memory.

The output head is applied to a few hundred tokens at a time, and again in the backward pass, so peak memory grows with
`chunk_size x V` and not with `N x V`. Legend: `N` tokens, `D` hidden size, `V` vocabulary (this rank's part of it if a
group divides the head), `k` vocabulary entries per token.

Invariants: every reduction over the vocabulary runs in float32 or wider, for any dtype of the weights. With a group,
the results are those of the whole vocabulary, and equal on all of its ranks.
"""

from nemo_rl.distributed.parallel_logprobs.chunked import (
    TopK,
    logprobs_from_logits,
    token_logprobs,
    topk_logits,
    topk_of,
)
from nemo_rl.distributed.parallel_logprobs.density import SamplingDensity, apply_top_k_top_p, log_normalizer
from nemo_rl.distributed.parallel_logprobs.head import (
    HeadUpdate,
    LogitTransform,
    default_chunk_size,
    initial_head,
    scalar_outputs,
)

__all__ = [
    "HeadUpdate",
    "LogitTransform",
    "SamplingDensity",
    "TopK",
    "apply_top_k_top_p",
    "default_chunk_size",
    "initial_head",
    "log_normalizer",
    "logprobs_from_logits",
    "scalar_outputs",
    "token_logprobs",
    "topk_logits",
    "topk_of",
]
