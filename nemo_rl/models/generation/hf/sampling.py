"""Draw tokens from logits with one seeded generator per request; the trainer's filters say what may be drawn.

Invariant: the returned log-probability is that of the distribution the token was drawn from.
"""

import torch

from nemo_rl.distributed.parallel_logprobs import apply_top_k_top_p
from nemo_rl.models.generation.interfaces import SamplingParams


def filtered_logprobs(logits_V: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Log-probabilities `[V]` float32 after temperature, top-k and top-p, in that order.

    Temperature 0 (greedy) leaves the distribution as it is; filtered tokens get -inf.
    """
    logits_V = logits_V.float()
    if sampling.temperature > 0:
        logits_V = logits_V / sampling.temperature
    filtered_V, _ = apply_top_k_top_p(logits_V, sampling.top_k, sampling.top_p)
    return filtered_V.log_softmax(-1)


def draw(logits_V: torch.Tensor, sampling: SamplingParams, generator: torch.Generator) -> tuple[int, float]:
    """One token id and its log-probability."""
    logprobs = filtered_logprobs(logits_V, sampling).cpu()
    if sampling.temperature == 0:
        token = int(logprobs.argmax())
    else:
        token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
    return token, float(logprobs[token])
