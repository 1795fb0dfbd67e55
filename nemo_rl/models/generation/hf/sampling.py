"""Draw tokens from logits with one seeded generator per request.

Invariant: the returned log-probability is that of the distribution the token was drawn from.
"""

import torch

from nemo_rl.models.generation.interfaces import SamplingParams


def filtered_logprobs(logits_V: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Log-probabilities `[V]` float32 after temperature, top-k and top-p, in that order.

    Temperature 0 (greedy) leaves the distribution as it is; filtered tokens get -inf.
    """
    logits_V = logits_V.float()
    if sampling.temperature > 0:
        logits_V = logits_V / sampling.temperature
    if sampling.top_k is not None and 0 < sampling.top_k < logits_V.numel():
        threshold = logits_V.topk(sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < threshold, -torch.inf)
    if sampling.top_p < 1.0:
        sorted_logits, order = logits_V.sort(descending=True)
        probs = sorted_logits.softmax(-1)
        beyond = probs.cumsum(-1) - probs >= sampling.top_p
        logits_V = logits_V.masked_fill(torch.zeros_like(beyond).scatter(0, order, beyond), -torch.inf)
    return logits_V.log_softmax(-1)


def draw(logits_V: torch.Tensor, sampling: SamplingParams, generator: torch.Generator) -> tuple[int, float]:
    """One token id and its log-probability."""
    logprobs = filtered_logprobs(logits_V, sampling).cpu()
    if sampling.temperature == 0:
        token = int(logprobs.argmax())
    else:
        token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
    return token, float(logprobs[token])
