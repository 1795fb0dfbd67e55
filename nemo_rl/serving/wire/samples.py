"""Read asample, and write its response.

Invariant: the seed of each sequence depends on the request alone, so a repeated request gives the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_rl.models.generation.interfaces import GenerationResult, SamplingParams
from nemo_rl.serving.interfaces import ModelLimits, PromptScores, RequestError, ScoreRequest
from nemo_rl.serving.wire.bodies import SampleBody, TensorBody
from nemo_rl.serving.wire.messages import DTYPES, STOP_REASONS, SampleResponse
from nemo_rl.serving.wire.passes import read_tokens
from nemo_rl.serving.wire.tensors import MOST_CELLS, dense_of, shaped
from nemo_rl.utils.seed import derive_seed

MOST_SAMPLES = 1024
"""Largest number of sequences of one request."""
MOST_TOP = 128
"""Largest number of likely tokens at each position."""
_EMPTY_CELL = -99999.0


@dataclass(frozen=True, eq=False)
class SampleCall:
    """Request to sample, and to score its prompt."""

    prompt: list[int]
    """Tokens of the prompt."""
    sampling: SamplingParams
    """Parameters of each sequence."""
    seeds: list[int]
    """Seed of each sequence."""
    score: ScoreRequest | None
    """Choice of scores of the prompt, or None for no scores."""
    returns_logprobs: bool
    """Whether log-probabilities of the prompt are returned."""
    top_sampled: int
    """Number of likely tokens to return at each sampled position."""
    sparse_targets: TensorBody | None = None
    """The targets as they were sent, if they are sparse, because the answer has the same form."""


def read_sample(body: SampleBody, limits: ModelLimits, seed_path: tuple[int | str, ...]) -> SampleCall:
    """Read a request.

    Args:
        limits: of the base model.
        seed_path: identity of the request, from which seeds are derived if it has no seed.

    Raises:
        RequestError: a value cannot be served.
    """
    prompt = read_tokens((_tokens_of(chunk) for chunk in body.prompt.chunks), "prompt", limits).tolist()
    _check_amounts(body, len(prompt))
    sampling = _sampling(body, len(prompt), limits)
    seed = body.sampling_params.seed
    path: tuple[int | str, ...] = ("sample", *seed_path) if seed is None else ("seeded", seed)
    seeds = [derive_seed(0, *path, number) for number in range(body.num_samples)]
    targets = (
        None if body.target_prompt_logprobs is None else _targets(body.target_prompt_logprobs, len(prompt), limits)
    )
    needs_score = bool(body.prompt_logprobs) or body.topk_prompt_logprobs > 0 or targets is not None
    score = ScoreRequest(body.topk_prompt_logprobs, targets, body.prompt_logprobs_last_n) if needs_score else None
    given = body.target_prompt_logprobs
    sparse = given if given is not None and given.sparse_crow_indices is not None else None
    return SampleCall(prompt, sampling, seeds, score, bool(body.prompt_logprobs), body.topk_sample_logprobs, sparse)


def _tokens_of(chunk: dict[str, Any]) -> Sequence[int]:
    kind, tokens = chunk.get("type", "encoded_text"), chunk.get("tokens")
    if kind != "encoded_text":
        what = {"image": "an image", "image_asset_pointer": "an image", "dmel": "audio"}.get(kind, repr(kind))
        raise RequestError(f"A chunk of prompt has {what}; this service reads text chunks only.")
    if not isinstance(tokens, list) or not all(type(token) is int and abs(token) < 2**62 for token in tokens):
        raise RequestError("A chunk of prompt has no list of token ids as tokens.")
    return tokens


def _check_amounts(body: SampleBody, length: int) -> None:
    if body.num_samples > MOST_SAMPLES:
        raise RequestError(f"num_samples is {body.num_samples}; at most {MOST_SAMPLES} are allowed.")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if getattr(body, name) > MOST_TOP:
            raise RequestError(f"{name} is {getattr(body, name)}; at most {MOST_TOP} are allowed.")
    if body.prompt_alt_tokens_k:
        raise RequestError("prompt_alt_tokens_k is not served; leave it out. topk_prompt_logprobs is served.")
    last = body.prompt_logprobs_last_n
    if last is not None and not (body.prompt_logprobs and 1 <= last < max(length, 2)):
        raise RequestError(
            f"prompt_logprobs_last_n is {last}; it needs prompt_logprobs, and must be from 1 to {length - 1} here."
        )


def _sampling(body: SampleBody, length: int, limits: ModelLimits) -> SamplingParams:
    given, room = body.sampling_params, limits.max_context - length
    if room < 1:
        raise RequestError(
            f"The prompt has {length} tokens, which leaves no room for a response: prompt and response have at most "
            f"{limits.max_context} tokens together."
        )
    if given.top_k == 0:
        raise RequestError("top_k is 0, which allows no token. Use -1 for all tokens.")
    texts, ids = _stops(given.stop, limits)
    return SamplingParams(
        temperature=given.temperature,
        top_k=given.top_k if given.top_k > 0 else None,
        top_p=given.top_p,
        max_new_tokens=min(room, given.max_tokens or room),
        stop_strings=texts,
        stop_token_ids=ids,
    )


def _stops(
    stop: str | Sequence[str] | Sequence[int] | None, limits: ModelLimits
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the texts and the ids that end a response. Without any given, the ids of the model do."""
    if stop is None:
        return (), limits.eos_ids
    stops = [stop] if isinstance(stop, str) else list(stop)
    texts = tuple(each for each in stops if isinstance(each, str))
    ids = tuple(each for each in stops if isinstance(each, int))
    if any(not text for text in texts):
        raise RequestError("stop has an empty text.")
    if any(not 0 <= each < limits.vocab_size for each in ids):
        raise RequestError(f"stop has an id outside 0..{limits.vocab_size - 1}.")
    return texts, ids


def _targets(body: TensorBody, length: int, limits: ModelLimits) -> NDArray[np.int64]:
    what = "target_prompt_logprobs"
    shape = body.shape or [len(body.data)]
    if len(shape) != 2 or shape[0] != length - 1 or not 1 <= shape[1] <= MOST_CELLS // max(length, 1):
        raise RequestError(f"{what} has the shape {shape}; with {length} tokens it must be [{length - 1}, K].")
    if any(not -1 <= token < limits.vocab_size for token in body.data):
        raise RequestError(f"{what} has an id outside -1..{limits.vocab_size - 1}.")
    values = np.array(body.data, np.int64)
    if body.sparse_crow_indices is None:
        return shaped(values, shape, what)
    indices = [_indices(each, what) for each in (body.sparse_crow_indices, body.sparse_col_indices or [])]
    return dense_of(values, indices[0], indices[1], shape, -1)


def _indices(values: list[int], what: str) -> NDArray[np.int64]:
    if any(not 0 <= value < 2**62 for value in values):
        raise RequestError(f"{what} has a negative or very large index.")
    return np.array(values, np.int64)


def write_sample(
    call: SampleCall,
    results: Sequence[GenerationResult],
    scores: PromptScores | None,
    sampled_scores: Sequence[PromptScores],
) -> bytes:
    """Return the bytes of a message `SampleResponse`.

    Args:
        results: sequence for each seed.
        scores: of the prompt, if they were requested.
        sampled_scores: of prompt and response of each sequence, if likely tokens were requested.
    """
    message = SampleResponse()
    for number, result in enumerate(results):
        ids, logprobs = result.token_ids.astype("<i4"), result.logprobs.astype("<f4")
        sequence = message.sequences.add(stop_reason=STOP_REASONS[result.finish_reason], tokens=ids.tobytes())
        sequence.logprobs = logprobs.tobytes()
        if call.top_sampled:
            _write_top(sequence.topk_sampled_logprobs, sampled_scores[number], len(ids))
    if scores is not None:
        if call.returns_logprobs:
            message.prompt_logprobs = scores.logprobs.astype("<f4").tobytes()
        if scores.top_ids is not None:
            _write_top(message.topk_prompt_logprobs, scores, len(call.prompt))
        if scores.target_logprobs is not None:
            _write_targets(message.target_prompt_logprobs, scores.target_logprobs, call.sparse_targets)
    return bytes(message.SerializeToString())


def _write_top(message: Any, scores: PromptScores, last: int) -> None:
    """Write the likely tokens of the last positions."""
    assert scores.top_ids is not None and scores.top_logprobs is not None, "they were requested"
    if not last:
        return
    ids, logprobs = scores.top_ids[-last:].astype("<i4"), scores.top_logprobs[-last:].astype("<f4")
    empty = ~np.isfinite(logprobs)
    ids[empty], logprobs[empty] = 0, _EMPTY_CELL
    message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()
    message.length, message.k = ids.shape


def _write_targets(message: Any, values: NDArray[np.float32], sparse: TensorBody | None) -> None:
    message.dtype = DTYPES["float32"]
    message.shape.extend(values.shape)
    if sparse is None:
        message.dense = values.astype("<f4").tobytes()
        return
    crow, columns = np.array(sparse.sparse_crow_indices, "<i8"), np.array(sparse.sparse_col_indices, "<i8")
    rows = np.repeat(np.arange(values.shape[0]), np.diff(crow))
    message.sparse_csr.values = values[rows, columns].astype("<f4").tobytes()
    message.sparse_csr.crow_indices, message.sparse_csr.col_indices = crow.tobytes(), columns.tobytes()
