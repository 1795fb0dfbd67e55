"""Draw tokens from logits with one seeded generator per request, and with the trainer's filters.

Invariant: the returned log-probability is that of the distribution from which the token was drawn.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from nemo_rl.distributed.parallel_logprobs import apply_top_k_top_p
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.utils.errors import NonFiniteError


def filtered_logprobs(logits_V: torch.Tensor, sampling: SamplingParams, banned: Sequence[int] = ()) -> torch.Tensor:
    """Compute log-probabilities `[V]` float32 after banned tokens, temperature, top-k and top-p, in that order.

    Temperature 0 (greedy) does not change the distribution; filtered tokens get -inf.
    """
    logits_V = logits_V.float()
    if banned:
        logits_V = logits_V.index_fill(0, torch.tensor(banned, device=logits_V.device), -torch.inf)
    if sampling.temperature > 0:
        logits_V = logits_V / sampling.temperature
    filtered_V, _ = apply_top_k_top_p(logits_V, sampling.top_k, sampling.top_p)
    return filtered_V.log_softmax(-1)


def bad_word_ids(words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Encode each word at the beginning of a text and, if its first token then differs, after a space.

    The rule is vLLM's (`SamplingParams.update_from_tokenizer`), so both engines forbid the same tokens.
    """
    sequences: list[list[int]] = []
    for word in words:
        first: list[int] = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced: list[int] = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        sequences.append(first)
        if len(spaced) == len(first) and spaced[0] != first[0]:
            sequences.append(spaced)
    return sequences


def banned_tokens(sequences: Sequence[list[int]], written: list[int]) -> list[int]:
    """Return the tokens that would complete one of the sequences after the written tokens."""
    return [ids[-1] for ids in sequences if ids[:-1] == written[max(0, len(written) - len(ids) + 1) :]]


def draw(
    logits_V: torch.Tensor, sampling: SamplingParams, generator: torch.Generator, banned: Sequence[int] = ()
) -> tuple[int, float]:
    """Draw a token that is not banned; return its id and its log-probability.

    Raises:
        NonFiniteError: the logits hold NaN or +inf.
    """
    logprobs = filtered_logprobs(logits_V, sampling, banned).cpu()
    if logprobs.isnan().any():
        raise NonFiniteError("The engine's logits are not finite.")
    if sampling.temperature == 0:
        token = int(logprobs.argmax())
    else:
        token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
    return token, float(logprobs[token])
