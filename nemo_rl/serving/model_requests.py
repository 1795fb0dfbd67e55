"""Check what clients send to the models, and turn it into rows and back.

Invariant: a request that a check accepts cannot spoil an adapter. Every refusal is a `RequestError` with a sentence for
the client, raised before anything is computed.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.token_sums import LOSSES, TARGETS, check_loss, check_loss_inputs
from nemo_rl.models.adapters.tensors import AdapterShape
from nemo_rl.models.adapters.training import AdamParams
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.models.policy.adapter_policy import padded_rows
from nemo_rl.models.policy.workers.adapter_rank import NamedLoss
from nemo_rl.serving.interfaces import (
    LossSpec,
    ModelLimits,
    PassResult,
    PromptScores,
    RequestError,
    ScoreRequest,
    TrainingDatum,
)
from nemo_rl.utils.errors import DataError

MAX_RANK = 1024
"""Largest rank of an adapter."""
_NO_LOGPROB = -99999.0
"""Log-probability in empty cells of the most likely tokens."""


def check_shape(shape: AdapterShape) -> None:
    """Refuse a shape that no adapter can have."""
    if not 1 <= shape.rank <= MAX_RANK:
        raise RequestError(f"The rank of an adapter has to be 1 to {MAX_RANK}, and rank={shape.rank} was given.")
    if not (math.isfinite(shape.alpha) and shape.alpha > 0):
        raise RequestError(f"The alpha of an adapter has to be a positive number, and alpha={shape.alpha} was given.")
    if not (shape.train_attn or shape.train_mlp or shape.train_unembed):
        raise RequestError("An adapter has to adapt some layers: set train_attn, train_mlp or train_unembed to true.")


def check_update(params: AdamParams) -> None:
    """Refuse parameters with which no update can be made."""
    ranges = {
        "learning_rate": (params.learning_rate, params.learning_rate >= 0, "at least 0"),
        "beta1": (params.beta1, 0 <= params.beta1 < 1, "at least 0 and below 1"),
        "beta2": (params.beta2, 0 <= params.beta2 < 1, "at least 0 and below 1"),
        "eps": (params.eps, params.eps > 0, "above 0"),
        "weight_decay": (params.weight_decay, params.weight_decay >= 0, "at least 0"),
        "grad_clip_norm": (params.grad_clip_norm, params.grad_clip_norm >= 0, "at least 0"),
    }
    for name, (value, is_within, allowed) in ranges.items():
        if not (math.isfinite(value) and is_within):
            raise RequestError(f"{name}={value} cannot be used: it has to be {allowed}.")


def named_loss(loss: LossSpec) -> NamedLoss:
    """Return a loss with all of its settings."""
    try:
        return NamedLoss(loss.name, check_loss(loss.name, loss.settings))
    except DataError as error:
        raise RequestError(str(error)) from error


def rows_of(data: Sequence[TrainingDatum], loss: NamedLoss, limits: ModelLimits) -> BatchedDataDict[Any]:
    """Return the rows of a pass."""
    if not data:
        raise RequestError("The request has no sequences.")
    targets, inputs = [], []
    for index, datum in enumerate(data):
        try:
            _check_tokens(datum.token_ids, limits)
            check_loss_inputs(loss.name, len(datum.token_ids), datum.inputs, limits.vocab_size)
        except (DataError, RequestError) as error:
            raise RequestError(f"Sequence {index}: {error}") from error
        targets.append(_columns(datum.inputs[TARGETS], torch.int64))
        inputs.append({name: _columns(datum.inputs[name], torch.float32) for name in LOSSES[loss.name].inputs})
    tokens = [torch.from_numpy(datum.token_ids.astype(np.int64)) for datum in data]
    return padded_rows(tokens, targets, inputs)


def _check_tokens(token_ids: NDArray[np.signedinteger[Any]], limits: ModelLimits, what: str = "A sequence") -> None:
    """Refuse tokens that the model cannot read."""
    if token_ids.ndim != 1 or len(token_ids) == 0:
        raise RequestError(f"{what} has to be a list of at least one token, and its shape is {token_ids.shape}.")
    if len(token_ids) > limits.max_context:
        raise RequestError(f"{what} has {len(token_ids)} tokens, and the model reads at most {limits.max_context}.")
    if token_ids.min() < 0 or token_ids.max() >= limits.vocab_size:
        wrong = token_ids[(token_ids < 0) | (token_ids >= limits.vocab_size)][0]
        raise RequestError(f"{what} has the token {wrong}, and token ids are 0 to {limits.vocab_size - 1}.")


def _columns(values: NDArray[np.generic], dtype: torch.dtype) -> Tensor:
    """Return values `[N]` or `[N, K]` as `[N, K]`."""
    given = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
    return given[:, None] if given.ndim == 1 else given


def pass_result(data: Sequence[TrainingDatum], loss_sum: float, logprobs: Tensor) -> PassResult:
    """Return the result of a pass.

    Args:
        loss_sum: sum of the loss.
        logprobs: `[B, T, k]`.
    """
    outputs = []
    for datum, row in zip(data, logprobs, strict=True):
        shape = datum.inputs[TARGETS].shape
        own = row[: shape[0], : shape[1] if len(shape) == 2 else 1].numpy()
        outputs.append({"logprobs": own.reshape(shape).astype(np.float32)})
    num_tokens = float(sum(len(datum.token_ids) for datum in data))
    return PassResult(outputs, {"loss:sum": loss_sum, "num_tokens:sum": num_tokens, "num_sequences:sum": len(data)})


def check_prompt(prompt: Sequence[int], limits: ModelLimits) -> NDArray[np.int64]:
    """Return a prompt as an array."""
    token_ids = np.asarray(prompt, np.int64)
    _check_tokens(token_ids, limits, "The prompt")
    return token_ids


def check_sampling(params: SamplingParams, num_prompt: int, limits: ModelLimits) -> None:
    """Refuse parameters with which nothing can be sampled."""
    ranges = {
        "temperature": (
            params.temperature,
            math.isfinite(params.temperature) and params.temperature >= 0,
            "at least 0",
        ),
        "top_p": (params.top_p, 0 < params.top_p <= 1, "above 0 and at most 1"),
        "top_k": (params.top_k, params.top_k is None or params.top_k >= 1, "at least 1, or none"),
        "max_tokens": (params.max_new_tokens, params.max_new_tokens >= 1, "at least 1"),
    }
    for name, (value, is_within, allowed) in ranges.items():
        if not is_within:
            raise RequestError(f"{name}={value} cannot be used: it has to be {allowed}.")
    if num_prompt >= limits.max_context:
        raise RequestError(
            f"The prompt has {num_prompt} tokens and leaves no room for a response. Prompt and response have at most "
            f"{limits.max_context} tokens."
        )


def score_rows(prompt: NDArray[np.int64], request: ScoreRequest, limits: ModelLimits) -> BatchedDataDict[Any]:
    """Return the row that scores a prompt of at least two tokens: its tokens, and after them the further targets."""
    if not 0 <= request.top_k <= limits.vocab_size:
        raise RequestError(f"top_k={request.top_k} cannot be used: it has to be 0 to {limits.vocab_size}.")
    if request.last_n is not None and request.last_n < 0:
        raise RequestError(f"last_n={request.last_n} cannot be used: it has to be at least 0.")
    targets = [prompt[1:, None]]
    if request.targets is not None:
        given = np.asarray(request.targets, np.int64)
        if given.ndim != 2 or len(given) != len(prompt) - 1:
            raise RequestError(f"The targets have the shape {given.shape}, and need {len(prompt) - 1} rows.")
        if given.size and (given.min() < -1 or given.max() >= limits.vocab_size):
            raise RequestError(f"The targets have to be token ids from 0 to {limits.vocab_size - 1}, or -1 for none.")
        targets.append(given.clip(min=0))
    ids = torch.from_numpy(prompt[:-1].copy())
    return padded_rows([ids], [torch.from_numpy(np.concatenate(targets, axis=1))])


def prompt_scores(
    num_tokens: int, request: ScoreRequest, scores_tk: NDArray[np.float32], top: tuple[Tensor, Tensor] | None
) -> PromptScores:
    """Return the scores of a prompt in the client's form.

    Args:
        num_tokens: number of tokens of the prompt.
        request: what was asked for.
        scores_tk: log-probabilities of the columns of `score_rows`, `[num_tokens - 1, k]`.
        top: log-probabilities and ids of the most likely tokens, `[num_tokens - 1, top_k]`. None if not asked for.
    """
    first = num_tokens - (num_tokens if request.last_n is None else min(request.last_n, num_tokens))
    logprobs = np.full(num_tokens, np.nan, np.float32)
    logprobs[1:] = scores_tk[:, 0]
    logprobs[:first] = np.nan
    further = None
    if request.targets is not None:
        further = np.where(np.asarray(request.targets) < 0, np.nan, scores_tk[:, 1:]).astype(np.float32)
        further[: max(0, first - 1)] = np.nan
    if request.top_k == 0:
        return PromptScores(logprobs, target_logprobs=further)
    ids = np.zeros((num_tokens, request.top_k), np.int32)
    top_logprobs = np.full((num_tokens, request.top_k), _NO_LOGPROB, np.float32)
    if top is not None:
        top_logprobs[1:], ids[1:] = top[0].numpy(), top[1].numpy()
    ids[:first], top_logprobs[:first] = 0, _NO_LOGPROB
    return PromptScores(logprobs, ids, top_logprobs, further)
