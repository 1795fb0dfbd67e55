"""Compute with plain Hugging Face what an engine should have drawn: no cache, no batch, float64 log-probabilities."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.models.huggingface.checkpoint_names import in_checkpoint

_SPREAD = 0.5
"""Standard deviation of the factors between a checkpoint's weights and those of another version of it."""

type Banned = Callable[[list[int]], Sequence[int]]


@lru_cache(maxsize=4)
def model_of(folder: str, seed: int) -> PreTrainedModel:
    """Load a checkpoint in float32; with a seed other than 0, multiply each weight by a random factor near 1."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters() if seed else ():
            parameter.mul_(1 + _SPREAD * torch.randn(parameter.shape, generator=generator))
    return model


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors of a model by their names in checkpoints, tied ones once, as a weight sync sends them."""
    persistent = model.state_dict()
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    named |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return dict(in_checkpoint(model, named.items()))


@torch.no_grad()
def logits_of(model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    """Return the float64 logits `[response length, V]` from which each token of a response was drawn."""
    ids = torch.tensor([[*prompt, *response]])
    logits: torch.Tensor = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.double()


def distribution(
    model: PreTrainedModel,
    prompt: Sequence[int],
    response: Sequence[int],
    sampling: SamplingParams,
    banned: Banned = lambda written: (),
) -> torch.Tensor:
    """Return the log-probabilities `[response length, V]` of the distributions that a response was drawn from.

    Args:
        model: the weights.
        prompt: tokens before the response.
        response: its tokens.
        sampling: temperature, then the tokens that top-k and then top-p keep.
        banned: returns the tokens that may not follow the written ones.
    """
    logits = logits_of(model, prompt, response)
    for position in range(len(response)):
        logits[position, list(banned(list(response[:position])))] = -torch.inf
    logits /= sampling.temperature or 1.0
    for row in logits:
        order = row.argsort(descending=True)[: sampling.top_k or len(row)]
        before = row[order].softmax(0).cumsum(0).roll(1)
        before[0] = 0.0
        kept = torch.full_like(row, -torch.inf)
        allowed = order[before < sampling.top_p]
        kept[allowed] = row[allowed]
        row.copy_(kept)
    return logits.log_softmax(-1)


def logprobs_of(
    model: PreTrainedModel,
    prompt: Sequence[int],
    response: Sequence[int],
    sampling: SamplingParams,
    banned: Banned = lambda written: (),
) -> torch.Tensor:
    """Return the float64 log-probability `[response length]` of each token of a response; see `distribution`."""
    ids = torch.tensor(list(response), dtype=torch.long)
    return distribution(model, prompt, response, sampling, banned).gather(1, ids[:, None])[:, 0]
