"""Define the case of a check (model, prompts and tolerance), and engine calls that several checks share."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.host.boundary import raised_as
from nemo_rl.models.generation.interfaces import (
    Engine,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    VersionSpan,
)
from nemo_rl.models.huggingface.checkpoint_names import in_checkpoint
from nemo_rl.models.huggingface.load import float32_parameters, load_causal_lm, read_config
from nemo_rl.models.huggingface.recurrent import use_configured_time_steps
from nemo_rl.utils.errors import NemoRLError

_SPREAD = 0.5
"""Standard deviation of the factors between a checkpoint's weights and those of another version of it."""

type Banned = Callable[[list[int]], Sequence[int]]


@lru_cache(maxsize=4)
def model_of(folder: str, seed: int) -> PreTrainedModel:
    """Load a checkpoint in float32, with each weight multiplied by a random factor near 1 if the seed is not 0."""
    model = load_causal_lm(folder)
    use_configured_time_steps(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters() if seed else ():
            parameter.mul_(1 + _SPREAD * torch.randn(parameter.shape, generator=generator))
    return model


@lru_cache(maxsize=4)
def rounded(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a copy of a float32 model with weights in a format, except those that stay float32."""
    copy = deepcopy(model)
    kept = float32_parameters(copy, dtype)
    for name, parameter in copy.named_parameters():
        if name not in kept:
            parameter.data = parameter.data.to(dtype)
    return copy


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors of a model by their names in checkpoints, tied tensors once, like a weight sync."""
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
        sampling: temperature, then the tokens that top-k and then top-p keep.
        banned: function that returns the tokens that may not follow the sampled ones.
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
    """Return the float64 log-probability `[response length]` of each token of a response (from `distribution`)."""
    ids = torch.tensor(list(response), dtype=torch.long)
    return distribution(model, prompt, response, sampling, banned).gather(1, ids[:, None])[:, 0]


LONG = 90
"""Length in tokens of responses that must still be running when another call reaches the engine."""
_TENSORS_AT_A_TIME = 4
_FRACTIONS = (0.4, 0.2, 0.6, 0.1, 0.8)
"""Shares of a response's time after which `midway` calls `act`, tried in order until the response is still running."""
_LOWEST_IDS, _NUM_IDS = 20, 200
"""Lowest token id of the prompts, and number of ids that they use; these are ordinary tokens in every tokenizer."""


class ContractError(NemoRLError, AssertionError):
    """Raised if an engine breaks its contract. The message has the required and the actual behaviour."""


class NotOffered(NemoRLError):  # noqa: N818
    """Raised if an engine lacks the optional part of the contract that the message names."""


@dataclass(frozen=True)
class Case:
    """Model that an engine under test serves, and the tolerance of the comparison with the reference."""

    folder: str
    """Local folder of the model and its tokenizer; version 0 of the weights is its content."""
    tolerance: float = 1e-4
    """Largest difference of a log-probability from the reference in float32."""
    max_model_len: int = 256
    """Context limit of the engine."""
    deadline_s: float = 60.0
    """Seconds within which every call must end."""
    exempt: Mapping[str, str] = field(default_factory=dict)
    """Properties that the engine does not provide, each with the reason."""
    kill: Callable[[], None] | None = None
    """Function that ends the process of an engine that computes outside the caller's process. Without this function,
    weights that are not finite are used to break the engine."""
    dtype: torch.dtype | None = None
    """Number format of an engine that rounds weights and activations. Log-probabilities are then not compared one by
    one, because a token may get other experts by rounding, and differ by 1. Their distances are collected."""
    measured: list[float] = field(default_factory=list)
    """Largest difference of each comparison of log-probabilities so far."""
    distances: list[tuple[float, float]] = field(default_factory=list)
    """With `dtype`: distance of each log-probability from the reference in float32, of the engine and of the reference
    in this format."""

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model."""
        return load_tokenizer(self.folder)

    @cached_property
    def vocab_size(self) -> int:
        """The number of token ids that the model reads."""
        size: int = read_config(self.folder).get_text_config().vocab_size
        return size

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Prompts of very different lengths. The last one fills more than half of the context."""
        lengths = (3, 12, 1, 30, 7, self.max_model_len * 5 // 8)
        return [[_LOWEST_IDS + (11 * i + 7 * n) % _NUM_IDS for n in range(length)] for i, length in enumerate(lengths)]

    def model(self, seed: int = 0) -> PreTrainedModel:
        """Return the reference model with the weights of a version."""
        return model_of(self.folder, seed)

    def compare(self, what: str, model: PreTrainedModel, request: GenerationRequest, result: GenerationResult) -> None:
        """Compare log-probabilities with the reference's log-probabilities, or collect their distances with `dtype`.

        Raises:
            ContractError: the reference gives a token no probability, or without `dtype` another log-probability.
        """
        tokens = result.token_ids.tolist()
        expected = logprobs_of(model, request.prompt_token_ids, tokens, request.sampling)
        if self.dtype is not None:
            reference = rounded(model, self.dtype)
            of_reference = logprobs_of(reference, request.prompt_token_ids, tokens, request.sampling)
            found = torch.as_tensor(np.array(result.logprobs)).double()
            pairs = torch.stack([found, of_reference]).sub(expected).abs().T
            require(bool(pairs.isfinite().all()), f"{what}, {shown(request)}: a log-probability is not finite")
            self.distances.extend((float(engine), float(rounding)) for engine, rounding in pairs)
            return
        self.require_close(f"{what}, {shown(request)}", expected, result.logprobs)

    def require_close(self, what: str, expected: torch.Tensor, found: np.ndarray) -> None:
        """Raise a `ContractError` unless `found` are finite and equal to `expected` within the tolerance."""
        require(bool(expected.isfinite().all()), f"{what}: a token was drawn that its distribution excludes")
        error = float((torch.as_tensor(np.array(found)).double() - expected).abs().max()) if len(expected) else 0.0
        self.measured.append(error)
        require(
            error <= self.tolerance,
            f"{what}: log-probabilities differ by {error:.3g} from those of Hugging Face, allowed are "
            f"{self.tolerance:g}",
        )


def require(holds: bool, violated: str) -> None:
    """Raise a `ContractError` with a text unless a condition holds."""
    if not holds:
        raise ContractError(violated)


def ask(prompt: Sequence[int], seed: int = 0, **sampling: Any) -> GenerationRequest:
    """Request 12 tokens from an engine, unless `sampling` sets another number."""
    return GenerationRequest(list(prompt), SamplingParams(**{"max_new_tokens": 12} | sampling), seed)


def shown(request: GenerationRequest) -> str:
    """Describe a request for a message."""
    sampling = request.sampling
    return (
        f"prompt of {len(request.prompt_token_ids)} tokens, seed {request.seed}, temperature={sampling.temperature:g}, "
        f"top_p={sampling.top_p:g}, top_k={sampling.top_k}"
    )


_numbers = itertools.count()


def _raises_itself(error: Exception) -> ContractError:
    return ContractError(f"generate raises {error!r} itself, and must return an awaitable that does")


def start(
    engine: Engine, requests: Iterable[GenerationRequest]
) -> tuple[list[str], list[asyncio.Future[GenerationResult]]]:
    """Give requests to an engine, and return their ids and the open answers.

    Raises:
        ContractError: the call of `generate` raises an error itself.
    """
    ids: list[str] = []
    answers: list[asyncio.Future[GenerationResult]] = []
    for request in requests:
        ids.append(f"conformance-{next(_numbers)}")
        with raised_as(_raises_itself):  # an engine may raise anything
            answers.append(asyncio.ensure_future(engine.generate(ids[-1], request)))
    return ids, answers


async def answers_of(engine: Engine, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
    """Return the answers to requests that run at the same time, each of a valid form."""
    _, answers = start(engine, requests)
    return [well_formed(result) for result in await asyncio.gather(*answers)]


def well_formed(result: GenerationResult) -> GenerationResult:
    """Return a result if it has a valid form.

    Raises:
        ContractError: the result is not valid, whatever its tokens are.
    """
    kinds = (result.token_ids.dtype, result.logprobs.dtype)
    require(kinds == (np.int32, np.float32), f"token_ids and logprobs are {kinds}, and must be int32 and float32")
    counts = (len(result.token_ids), len(result.logprobs))
    require(counts[0] == counts[1], f"{counts[0]} tokens have {counts[1]} log-probabilities")
    require(result.finish_reason in ("stop", "length", "abort"), f"finish_reason={result.finish_reason!r}")
    spans = [VersionSpan(*span) for span in result.weight_versions]
    starts = [span.start for span in spans]
    rises = all(a < b for a, b in itertools.pairwise(starts)) and all(
        a.version != b.version for a, b in itertools.pairwise(spans)
    )
    require(
        bool(spans) and starts[0] == 0 and rises and starts[-1] < max(counts[0], 1),
        f"weight_versions={result.weight_versions} are no spans of {counts[0]} tokens from token 0 on",
    )
    return result


def same(first: GenerationResult, second: GenerationResult, tolerance: float) -> bool:
    """Return whether two results have the same tokens, the same end and, up to rounding, the same log-probabilities."""
    return (
        first.token_ids.tolist() == second.token_ids.tolist()
        and first.finish_reason == second.finish_reason
        and bool(np.allclose(first.logprobs, second.logprobs, rtol=0, atol=tolerance))
    )


async def load(
    engine: Engine, model: PreTrainedModel, version: int, left_out: str | None = None, most: int | None = None
) -> list[str]:
    """Give an engine new weights, and return the result of `finish_weight_update`.

    The tensors are overwritten with NaN afterwards, because an engine must not read them after the update.

    Args:
        left_out: name of a tensor that is not sent.
        most: number of tensors after which the update is interrupted, without an end; None sends all of them.
    """
    await engine.begin_weight_update()
    tensors = [(name, tensor) for name, tensor in tensors_of(model).items() if name != left_out]
    lent = [(name, tensor.clone()) for name, tensor in tensors[:most]]
    for group in itertools.batched(lent, _TENSORS_AT_A_TIME):
        await engine.load_tensors(list(group))
    reported = [] if most is not None else await engine.finish_weight_update(version)
    for _, tensor in lent:
        tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
    return reported


async def midway[Found](
    engine: Engine,
    requests: Sequence[GenerationRequest],
    act: Callable[[list[str]], Awaitable[Found]],
    met: Callable[[Found, list[GenerationResult]], bool],
    again: Callable[[], Awaitable[object]] | None = None,
) -> tuple[Found, list[GenerationResult]]:
    """Call `act` while responses are running, and return its result and the responses.

    Args:
        requests: requests for long responses, which all run at the same time.
        act: function of the ids of the requests.
        met: returns, from the result and the responses, whether `act` had its effect while the responses were running.
        again: undoes `act` before another attempt.

    Raises:
        ContractError: in no attempt did `act` have its effect while the responses were running.
    """
    before = time.monotonic()
    await answers_of(engine, requests)
    seconds = time.monotonic() - before
    for fraction in _FRACTIONS:
        ids, answers = start(engine, requests)
        await asyncio.sleep(seconds * fraction)
        found = await act(ids)
        results = [well_formed(result) for result in await asyncio.gather(*answers)]
        if met(found, results):
            return found, results
        if again is not None:
            await again()
    raise ContractError(
        f"no call showed its effect in the middle of responses of {len(results[0].token_ids)} tokens: an engine "
        "accepts other calls between two steps, and its answers show what they did"
    )
