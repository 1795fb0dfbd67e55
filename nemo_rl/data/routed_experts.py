"""Pass the experts of tokens from the engine's answers to the training batch.

    engine: [P + n, L, k] of prompt and answer ─► note_experts: each message has those of its tokens
                                                      └─► padded_experts: [B, T, L, k] of the batch ─► `layout`

L is the number of layers with experts, and k the number of experts of a token in each layer. Invariant: a token has its
experts for all layers, or `NOT_REPORTED` for all layers. In the second case the trainer's routers choose the experts.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROUTED_EXPERTS = "routed_experts"
"""Key of a message for `[t, L, k]`, and of a batch for `[B, T, L, k]`. It is absent if no engine reports experts."""
NOT_REPORTED = -1
"""Number that replaces the experts of a token for which the engine has not reported any."""

type Experts = NDArray[np.signedinteger[Any]]


def experts_dtype(num_experts: int) -> np.dtype[np.signedinteger[Any]]:
    """Return the smallest of int8, int16 and int32 that can represent the experts' numbers and `NOT_REPORTED`."""
    fitting = (np.int8, np.int16, np.int32)
    return np.dtype(next(kind for kind in fitting if num_experts - 1 <= np.iinfo(kind).max))


def with_unreported(reported: NDArray[Any], num_tokens: int, num_experts: int) -> Experts:
    """Return the experts of all tokens of a prompt and its answer, with `NOT_REPORTED` where they are missing.

    Args:
        reported: `[m, L, k]` experts of the first m tokens, of any integer dtype.
        num_tokens: number of tokens of prompt and answer. The last token was sampled, but no layer has processed it.
        num_experts: number of experts of each layer, which determines the dtype.
    """
    whole = np.full((num_tokens, *reported.shape[1:]), NOT_REPORTED, dtype=experts_dtype(num_experts))
    whole[: len(reported)] = reported[:num_tokens]
    return whole


def note_experts(log: Sequence[dict[str, Any]], experts: Experts | None) -> None:
    """Store the experts of a conversation in its messages.

    Tokens with experts keep them, because a later turn may read an answer's tokens again, but the experts must be those
    of its sampling. A later turn only adds the experts of the answer's last token and of observations.

    Args:
        log: the messages of the conversation up to an answer, with `token_ids`.
        experts: experts of all tokens of these messages, `[P + n, L, k]`, or None if they were not reported.

    Raises:
        ValueError: the number of tokens in `experts` differs from that of the messages.
    """
    if experts is None:
        return
    lengths = [message["token_ids"].numel() for message in log]
    if sum(lengths) != len(experts):
        raise ValueError(f"The engine reported experts of {len(experts)} tokens for a conversation of {sum(lengths)}.")
    for message, reported in zip(log, torch.from_numpy(np.array(experts)).split(lengths), strict=True):
        known = message.get(ROUTED_EXPERTS)
        message[ROUTED_EXPERTS] = reported if known is None else torch.where(known >= 0, known, reported)


def joined_experts(messages: Sequence[dict[str, Any]]) -> Experts | None:
    """Return the concatenated experts of messages, `[N, L, k]`, or None if no message has experts."""
    first: Tensor | None = next((m[ROUTED_EXPERTS] for m in messages if ROUTED_EXPERTS in m), None)
    if first is None:
        return None
    parts = [_of_message(message, first) for message in messages]
    joined: Experts = torch.cat(parts).numpy()
    return joined


def _of_message(message: dict[str, Any], like: Tensor) -> Tensor:
    if ROUTED_EXPERTS in message:
        known: Tensor = message[ROUTED_EXPERTS]
        return known
    return like.new_full((message["token_ids"].numel(), *like.shape[1:]), NOT_REPORTED)


def padded_experts(rows: Iterable[Experts | None], width: int) -> Tensor | None:
    """Return the experts of rows as `[B, T, L, k]`, with `NOT_REPORTED` on padding, or None if no row has any.

    Args:
        rows: experts of each row, `[n, L, k]`, or None for a row without experts.
        width: number of tokens T of the longest row.
    """
    given = list(rows)
    first = next((row for row in given if row is not None), None)
    if first is None:
        return None
    padded = np.full((len(given), width, *first.shape[1:]), NOT_REPORTED, dtype=first.dtype)
    for row, experts in zip(padded, given, strict=True):
        if experts is not None:
            row[: len(experts)] = experts
    return torch.from_numpy(padded)
