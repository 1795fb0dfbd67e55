"""Draw the next tokens of rows from their logits, with the filters of the trainer.

Rows with the same sampling parameters are computed together, and each row has its own random generator. Invariant: the
token of a row depends only on its logits, its parameters and its generator. The returned log-probability is that of the
distribution from which the token was drawn.
"""

from collections.abc import Iterator, Sequence
from itertools import batched, chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nemo_rl.distributed.parallel_logprobs import apply_top_k_top_p
from nemo_rl.distributed.parallel_logprobs.density import whole_logprobs
from nemo_rl.models.generation.interfaces import SamplingParams

_TOKENS_PER_BLOCK = 64
_LOGITS_AT_ONCE = 1 << 18
"""Number of logits for which log-probabilities are computed at once, so that they stay in a processor's cache."""


class Drawn(NamedTuple):
    """A token and its log-probability."""

    token: int
    """Id of the token."""
    logprob: float
    """Its log-probability. NaN if the logits contain NaN or +inf."""


class Distribution(NamedTuple):
    """Parameters that change the distribution of the next token. Rows with equal ones are computed together."""

    temperature: float
    """Softmax temperature. 0 means greedy."""
    top_k: int | None = None
    """Number of most likely tokens that can be drawn. If None, all can."""
    top_p: float = 1.0
    """Cumulative probability of the smallest set of tokens that can be drawn."""
    banned: tuple[int, ...] = ()
    """Tokens that cannot be drawn."""

    @classmethod
    def of(cls, sampling: SamplingParams, banned: Sequence[int]) -> "Distribution":
        """Return the distribution of sampling parameters without banned tokens."""
        return cls(sampling.temperature, sampling.top_k, sampling.top_p, tuple(banned))


def filtered_logprobs(logits_bV: Tensor, distribution: Distribution) -> Tensor:
    """Compute log-probabilities `[b, V]` float32 after banned tokens, temperature, top-k and top-p, in that order.

    Temperature 0 (greedy) does not change the distribution. Filtered tokens get -inf.
    """
    logits_bV = logits_bV.float()
    if distribution.banned:
        banned = torch.tensor(distribution.banned, device=logits_bV.device)
        logits_bV = logits_bV.index_fill(-1, banned, -torch.inf)
    if distribution.temperature not in (0, 1):
        logits_bV = logits_bV / distribution.temperature
    filtered_bV, _ = apply_top_k_top_p(logits_bV, distribution.top_k, distribution.top_p)
    return whole_logprobs(filtered_bV)


def draw(logits_bV: Tensor, distribution: Distribution, generators: Sequence[torch.Generator]) -> list[Drawn]:
    """Draw a token for each row of logits `[b, V]`, with the row's generator."""
    num_rows = max(1, _LOGITS_AT_ONCE // logits_bV.shape[-1])
    parts = zip(logits_bV.split(num_rows), batched(generators, num_rows), strict=True)
    return list(chain.from_iterable(_draw_few(part, distribution, some) for part, some in parts))


def _draw_few(logits_bV: Tensor, distribution: Distribution, generators: Sequence[torch.Generator]) -> Iterator[Drawn]:
    """Draw a token for each of a few rows."""
    logprobs_bV = filtered_logprobs(logits_bV, distribution).cpu()
    tokens_b = logprobs_bV.argmax(-1) if distribution.temperature == 0 else _inverse(logprobs_bV, generators)
    chosen_b = logprobs_bV.gather(-1, tokens_b[:, None])[:, 0]
    chosen_b = chosen_b.masked_fill(logprobs_bV.sum(-1).isnan(), torch.nan)
    return (Drawn(*each) for each in zip(tokens_b.tolist(), chosen_b.tolist(), strict=True))


def _inverse(logprobs_bV: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Return `[b]` tokens where the cumulative probability exceeds a uniform number (inverse transform sampling).

    A first search finds a block of tokens, and a second one finds the token in it, because cumulative sums over all
    tokens would take longer than the rest. They are in float64, so that rare tokens keep their probabilities.
    """
    vocab_size = logprobs_bV.shape[-1]
    uniform_b = torch.cat([torch.rand(1, generator=generator, dtype=torch.float64) for generator in generators])
    missing = -vocab_size % _TOKENS_PER_BLOCK
    probabilities_bV = F.pad(logprobs_bV.exp(), (0, missing)) if missing else logprobs_bV.exp()
    blocks_bnk = probabilities_bV.unflatten(-1, (-1, _TOKENS_PER_BLOCK))
    ends_bn = blocks_bnk.sum(-1).cumsum(-1, dtype=torch.float64)
    below_b = uniform_b * ends_bn[:, -1]
    block_b = _first_above(ends_bn, below_b)
    rows_b = torch.arange(len(block_b))
    start_b = F.pad(ends_bn, (1, 0))[rows_b, block_b]
    inside_bk = blocks_bnk[rows_b, block_b].cumsum(-1, dtype=torch.float64)
    tokens_b = block_b * _TOKENS_PER_BLOCK + _first_above(inside_bk, below_b - start_b)
    return tokens_b.clamp(max=vocab_size - 1)


def _first_above(cumulative_bn: Tensor, value_b: Tensor) -> Tensor:
    """Return `[b]` indices of the first cumulative sum above a value, which is lowered if rounding made it too large.

    The entry at that index is then not zero. Rows with NaN get the last index.
    """
    last_b = cumulative_bn[:, -1]
    value_b = torch.minimum(value_b, last_b.nextafter(torch.zeros_like(last_b)))
    found_b1 = torch.searchsorted(cumulative_bn, value_b[:, None], right=True)
    return found_b1[:, 0].clamp(max=cumulative_bn.shape[1] - 1)


def bad_word_ids(words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Encode each word for the beginning of a text, and for a place after a space if its first token then differs.

    vLLM uses the same rule (`SamplingParams.update_from_tokenizer`), so both engines forbid the same tokens.
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
    """Return the tokens that would complete a forbidden sequence, given the tokens so far."""
    return [ids[-1] for ids in sequences if ids[:-1] == written[max(0, len(written) - len(ids) + 1) :]]
