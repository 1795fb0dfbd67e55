"""Define the interface and the names of losses, and make losses from functions of single tokens.

`token_loss` makes a loss from a function of single tokens. `supervised` and `policy_gradient` contain losses that are
classes. Invariants: everything that a worker needs to know about a loss before calling it is an attribute declared
here. `TokenLoss` applies mask and denominator itself, so the result never depends on microbatches, ranks, packing or
padding.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Protocol

from torch import Tensor

from nemo_rl.losses.reductions import masked_mean
from nemo_rl.utils.named_parts import Registry

type LossMetrics = dict[str, Tensor | float]
type LossData = Mapping[str, Any]


class LossType(Enum):
    """The global denominator of a loss."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(Enum):
    """The input that a worker prepares for a loss from the model's output."""

    LOGIT = "logit"
    """The unchanged output of the model: `[B, T, V]` logits or `[B]` scores."""
    LOGPROB = "logprob"
    """`[B, T-1]` log-probabilities of the tokens at positions 1..T-1."""
    VALUE = "value"
    """`[B, T-1]` outputs of a scalar head: entry t-1 is the value of the state before token t, for t in 1..T-1."""
    DISTILLATION = "distillation"
    """Log-probabilities of student and teacher over the teacher's top-k tokens (`TopkLossFunction`)."""
    CANDIDATES = "candidates"
    """`[B, T-1, K]` log-probabilities of the tokens `candidate_ids [B, T, K]` of the batch."""
    DRAFT = "draft"
    """Logits of a draft model and of its teacher."""


def extreme_of(name: str) -> Callable[[Iterable[float]], float] | None:
    """Return `min` for metrics named `min_...` or `..._min`, `max` for those named alike, and None for all others."""
    for word, extreme in (("min", min), ("max", max)):
        if name.startswith(f"{word}_") or name.endswith(f"_{word}"):
            return extreme
    return None


class LossFunction(Protocol):
    """A loss over one microbatch, already divided by the denominators of the global batch.

    If some metrics are means over tokens and others are means over sequences, the attribute `sequence_means` names
    those over sequences. Without this attribute, all metrics are means of the kind `loss_type`.
    """

    loss_type: LossType
    """Global denominator of the loss."""
    input_type: LossInputType
    """Kind of the first argument of the call."""
    needs_reference: bool
    """Whether `data` must contain `reference_policy_logprobs [B, T]`."""
    rows_per_unit: int
    """Number of consecutive rows that must be in one microbatch: 2 for pairs, otherwise 1."""

    def __call__(
        self,
        model_output: Tensor,
        /,
        data: LossData,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
    ) -> tuple[Tensor, LossMetrics]:
        """Compute loss and metrics of one microbatch.

        Args:
            model_output: Input of the kind `input_type`. It is the only differentiable input.
            data: Microbatch with rows `B`. Per-token tensors are `[B, T]`, and position t belongs to token t.
            global_valid_seqs: `sum(sample_mask)` over all rows of the optimizer update.
            global_valid_toks: `sum(token_mask[:, 1:] * sample_mask[:, None])` over the same rows.

        Returns:
            Scalar loss, and metrics that are summed over microbatches and ranks. Metrics that are a minimum or a
            maximum by their name (`extreme_of`) are reduced in this way instead.
        """
        ...


class TopkLossFunction(Protocol):
    """A loss that compares a student with a teacher's top-k tokens, with the attributes of `LossFunction`."""

    loss_type: LossType
    input_type: LossInputType
    needs_reference: bool
    rows_per_unit: int

    def __call__(
        self,
        student_topk_logprobs: Tensor,
        teacher_topk_logprobs: Tensor,
        H_all: Tensor | None,
        /,
        data: LossData,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
    ) -> tuple[Tensor, LossMetrics]:
        """Compute loss and metrics of one microbatch.

        Args:
            student_topk_logprobs: `[B, T-1, k]`, the student's log-probabilities of the teacher's top-k tokens,
                normalised over the whole vocabulary. They are differentiable.
            teacher_topk_logprobs: `[B, T-1, k]`, the teacher's log-probabilities, normalised over the k tokens.
            H_all: `[B, T-1]`, `sum p log p` of the student over the whole vocabulary, in nats. It is the negative of
                the entropy, as in NeMo RL, and differentiable.
            data: Microbatch, as in `LossFunction`. It also contains `teacher_topk_logits` and `teacher_topk_indices`.
            global_valid_seqs: As in `LossFunction`.
            global_valid_toks: As in `LossFunction`.

        Returns:
            Scalar loss and metrics, as in `LossFunction`.
        """
        ...


type AnyLossFunction = LossFunction | TopkLossFunction
"""Any loss for the training of a policy."""

LOSSES: Registry[Any] = Registry(
    "loss",
    LossFunction,
    {
        "clipped_pg": "nemo_rl.losses.policy_gradient.ClippedPGLossFn",
        "distillation": "nemo_rl.losses.supervised.DistillationLossFn",
        "dpo": "nemo_rl.losses.preference.DPOLossFn",
        "nll": "nemo_rl.losses.supervised.NLLLossFn",
        "preference": "nemo_rl.losses.preference.PreferenceLossFn",
    },
)
"""Losses by their names in `loss_fn.name`. Each built-in loss belongs to one algorithm."""

type PerToken = Callable[[Tensor, LossData], Tensor]
"""Function `(logprobs [B, T-1], data aligned with them) -> losses [B, T-1]`."""


class TokenLoss:
    """The mean of a function of tokens over all tokens that count, made by `token_loss`.

    `loss = sum(mask * per_token(logprobs, data)) / global_valid_toks`

    Args:
        per_token: Function that computes the loss of every token, including tokens that do not count. Its first
            argument has the log-probabilities `[B, T-1]` of tokens 1 to T-1. Its second argument is the batch with
            per-token tensors `[B, T]` cut to the same tokens: column i of both belongs to the same token.
        needs_reference: Whether the batch must contain `reference_policy_logprobs [B, T]`.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    rows_per_unit = 1

    def __init__(self, per_token: PerToken, needs_reference: bool = False) -> None:
        self.per_token = per_token
        self.needs_reference = needs_reference
        # # Name, docstring and module are those of the function. Workers import the loss by its module.
        functools.update_wrapper(self, per_token)

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: LossData,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
    ) -> tuple[Tensor, LossMetrics]:
        """Compute the loss. The metrics are `loss` and `nll`, the negative log-likelihood.

        Raises:
            ValueError: The result of `per_token` has another shape than the log-probabilities.
        """
        aligned = _aligned(data, next_token_logprobs.shape[1] + 1)
        losses_BT = self.per_token(next_token_logprobs, aligned)
        if losses_BT.shape != next_token_logprobs.shape:
            raise ValueError(
                f"{getattr(self.per_token, '__name__', 'the loss')} returned shape {tuple(losses_BT.shape)}; a token "
                f"loss returns one value for each of the log-probabilities {tuple(next_token_logprobs.shape)}. "
                "For sums over sequences write a class, as nemo_rl.losses.loss_function.LossFunction."
            )
        mask_BT = aligned["token_mask"] * data["sample_mask"][:, None]
        loss = masked_mean(losses_BT, mask_BT, None, global_valid_toks)
        nll = masked_mean(-next_token_logprobs.detach(), mask_BT, None, global_valid_toks)
        return loss, {"loss": loss.detach(), "nll": nll}


def token_loss(per_token: PerToken) -> TokenLoss:
    """Make a loss from a function of single tokens (`TokenLoss`).

    Example:
        >>> @token_loss
        ... def focal(logprobs, data):
        ...     return -((1 - logprobs.exp()) ** 2) * logprobs
        >>> policy.train(batch, focal)
    """
    return TokenLoss(per_token)


def _aligned(data: LossData, num_tokens: int) -> dict[str, object]:
    """Drop the first column of per-token tensors `[B, T, ...]`, and return all other values unchanged."""
    return {
        name: value[:, 1:] if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == num_tokens else value
        for name, value in data.items()
    }
