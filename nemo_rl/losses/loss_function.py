"""What a policy worker may expect of every loss.

Invariant: everything a worker must know about a loss before calling it is an attribute declared here, never something
to probe for.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Protocol

from torch import Tensor

type LossMetrics = dict[str, Tensor | float]
type LossData = Mapping[str, Any]


class LossType(Enum):
    """Which global denominator the loss divides by."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(Enum):
    """What the worker prepares from the model output before it calls the loss."""

    LOGIT = "logit"
    """The model's output as it is: `[B, T, V]` logits or `[B]` scores."""
    LOGPROB = "logprob"
    """`[B, T-1]` log-probabilities of the tokens at positions 1..T-1."""
    DISTILLATION = "distillation"
    """Student and teacher log-probabilities over the teacher's top-k tokens; see `TopkLossFunction`."""
    DRAFT = "draft"
    """Teacher and student logits of a draft model."""


def extreme_of(name: str) -> Callable[[Iterable[float]], float] | None:
    """`min` for metrics named `min_...` or `..._min`, `max` in the same way, None for all others."""
    for word, extreme in (("min", min), ("max", max)):
        if name.startswith(f"{word}_") or name.endswith(f"_{word}"):
            return extreme
    return None


class LossFunction(Protocol):
    """A loss over one microbatch, already divided by the denominators of the global batch.

    Attributes:
        loss_type: Global denominator the loss divides by.
        input_type: What the first argument has to be.
        needs_reference: Whether `data` must hold `reference_policy_logprobs [B, T]`.
        rows_per_unit: Consecutive rows that must stay in one microbatch: 2 for pairs, else 1.

    A loss some of whose metrics are means over tokens and some over sequences names the latter in an attribute
    `sequence_means`; without it all of them are of the kind of `loss_type`.
    """

    loss_type: LossType
    input_type: LossInputType
    needs_reference: bool
    rows_per_unit: int

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
            model_output: Prepared as `input_type` says; the only differentiable input.
            data: Microbatch with rows `B`; per-token tensors are `[B, T]`, position t belongs to
                token t.
            global_valid_seqs: `sum(sample_mask)` over all rows of the optimizer update.
            global_valid_toks: `sum(token_mask[:, 1:] * sample_mask[:, None])` over the same rows.

        Returns:
            Scalar loss, and metrics that may be summed over microbatches and ranks; those that are a minimum or
            maximum by their name (`extreme_of`) are reduced by it.
        """
        ...


class TopkLossFunction(Protocol):
    """A loss that compares a student with a teacher's top-k tokens; otherwise as `LossFunction`."""

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
                normalised over the whole vocabulary; differentiable.
            teacher_topk_logprobs: `[B, T-1, k]`, the teacher's, normalised over the k tokens.
            H_all: `[B, T-1]`, `sum p log p` of the student over the whole vocabulary, in nats: the negative of its
                entropy, as NeMo RL gives it; differentiable.
            data: Microbatch, as in `LossFunction`; holds `teacher_topk_logits` and `teacher_topk_indices` too.
            global_valid_seqs: As in `LossFunction`.
            global_valid_toks: As in `LossFunction`.

        Returns:
            As `LossFunction`.
        """
        ...


type AnyLossFunction = LossFunction | TopkLossFunction
"""What a policy can train on."""
