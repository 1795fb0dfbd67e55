"""The interface of losses, and their names.

Invariant: all that a worker needs to know about a loss before calling it is an attribute declared here.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Protocol

from torch import Tensor

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
    """The model's unchanged output: `[B, T, V]` logits or `[B]` scores."""
    LOGPROB = "logprob"
    """`[B, T-1]` log-probabilities of the tokens at positions 1..T-1."""
    VALUE = "value"
    """`[B, T-1]` outputs of a scalar head: entry t-1 is the value of the state before token t, for t in 1..T-1."""
    DISTILLATION = "distillation"
    """Student and teacher log-probabilities over the teacher's top-k tokens; see `TopkLossFunction`."""
    DRAFT = "draft"
    """Teacher and student logits of a draft model."""


def extreme_of(name: str) -> Callable[[Iterable[float]], float] | None:
    """Return `min` for metrics named `min_...` or `..._min`, `max` likewise, and None for all others."""
    for word, extreme in (("min", min), ("max", max)):
        if name.startswith(f"{word}_") or name.endswith(f"_{word}"):
            return extreme
    return None


class LossFunction(Protocol):
    """A loss over one microbatch, already divided by the denominators of the global batch.

    If some metrics are means over tokens and others are means over sequences, the attribute `sequence_means` names
    the latter; without it all are means of the kind of `loss_type`.
    """

    loss_type: LossType
    """Global denominator the loss divides by."""
    input_type: LossInputType
    """Kind of the first argument."""
    needs_reference: bool
    """Whether `data` must hold `reference_policy_logprobs [B, T]`."""
    rows_per_unit: int
    """Consecutive rows that must stay in one microbatch: 2 for pairs, else 1."""

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
    """A loss that compares a student with a teacher's top-k tokens; the attributes are those of `LossFunction`."""

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
"""Any loss that a policy can train on."""

LOSSES: Registry[Any] = Registry(
    "loss",
    LossFunction,
    {
        "clipped_pg": "nemo_rl.losses.policy_gradient.ClippedPGLossFn",
        "distillation": "nemo_rl.losses.distillation.DistillationLossFn",
        "dpo": "nemo_rl.losses.preference.DPOLossFn",
        "nll": "nemo_rl.losses.likelihood.NLLLossFn",
        "preference": "nemo_rl.losses.preference.PreferenceLossFn",
    },
)
"""Losses that `loss_fn.name` may name; each algorithm has one of the built-in ones."""
