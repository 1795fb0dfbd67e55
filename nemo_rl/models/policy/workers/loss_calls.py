"""Call a loss on the model's output: build its inputs, and reduce its metrics.

Before the forward, `rank.PolicyWorker.train` builds the inputs that a loss declares in `input_type`. After the forward,
it calls the loss. `lm_policy` checks the keys that a batch needs. Workers reduce metrics over microbatches, and the
controller reduces them over ranks and updates. A metric's name says whether it is a count (`is_count`) or an extreme
(`loss_function.extreme_of`). All other metrics are means.

Invariants: losses of one input type receive the same tensors in the same places, whatever the layout, the ranks and the
backend. Losses divide their metrics by global counts, so the parts of one update add up.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.cross_tokenizer import COLUMNS
from nemo_rl.losses.loss_function import (
    AnyLossFunction,
    LossFunction,
    LossInputType,
    LossMetrics,
    LossType,
    TopkLossFunction,
    extreme_of,
)
from nemo_rl.models.training.inputs import (
    InputLayout,
    ModelInputs,
    build_candidate_inputs,
    build_distillation_inputs,
    build_score_inputs,
    build_training_inputs,
)
from nemo_rl.utils.errors import ConfigError

BuildInputs = Callable[[BatchedDataDict[Any], InputLayout, torch.device], ModelInputs]

_BUILDERS: dict[LossInputType, BuildInputs] = {
    LossInputType.LOGIT: build_score_inputs,
    LossInputType.LOGPROB: build_training_inputs,
    LossInputType.VALUE: build_training_inputs,
    LossInputType.DISTILLATION: build_distillation_inputs,
    LossInputType.CANDIDATES: build_candidate_inputs,
}


def input_type_of(loss_fn: AnyLossFunction) -> LossInputType:
    """Return the input type of a loss, or log-probabilities if a user's own loss declares none."""
    return getattr(loss_fn, "input_type", LossInputType.LOGPROB)


def extra_keys(loss_fn: AnyLossFunction) -> tuple[str, ...]:
    """Return the keys that this loss needs beyond the keys of every training batch."""
    keys = ["reference_policy_logprobs"] if getattr(loss_fn, "needs_reference", False) else []
    if input_type_of(loss_fn) is LossInputType.DISTILLATION:
        keys += ["teacher_topk_logits", "teacher_topk_indices"]
    if input_type_of(loss_fn) is LossInputType.CANDIDATES:
        keys += COLUMNS
    return tuple(keys)


def input_builder(loss_fn: AnyLossFunction) -> BuildInputs:
    """Return the function that lays out a microbatch for this loss."""
    return _BUILDERS[input_type_of(loss_fn)]


def call_loss(
    loss_fn: AnyLossFunction,
    inputs: ModelInputs,
    scores: Tensor,
    entropy_K: Tensor,
    rows: BatchedDataDict[Any],
    global_valid: tuple[Tensor, Tensor],
) -> tuple[Tensor, LossMetrics]:
    """Compute loss and metrics of one microbatch.

    Args:
        loss_fn: The loss. It receives `[b, T - 1]` log-probabilities or values, or `[b, 1]` scores of sequences. For
            distillation it receives the student's log-probabilities of the teacher's top-k tokens `[b, T - 1, k]`, the
            teacher's log-probabilities, normalised over these k tokens, and the student's negative entropy over the
            whole vocabulary `[b, T - 1]`. A loss of candidates receives their log-probabilities `[b, T - 1, k]`.
        inputs: Inputs of the forward.
        scores: `[K]`, or `[K, k]` for distillation and for losses of candidates.
        entropy_K: Entropy of the distribution at each scored position.
        rows: The microbatch, on the model's device.
        global_valid: Numbers of valid sequences and valid tokens of the global batch.
    """
    seqs, toks = global_valid
    student = inputs.scatter(scores)
    if input_type_of(loss_fn) is not LossInputType.DISTILLATION:
        loss = cast(LossFunction, loss_fn)
        return loss(student, data=rows, global_valid_seqs=seqs, global_valid_toks=toks)
    compare = cast(TopkLossFunction, loss_fn)
    teacher = torch.log_softmax(rows["teacher_topk_logits"][:, :-1].to(student.dtype), dim=-1)
    negative_entropy = -inputs.scatter(entropy_K)
    return compare(student, teacher, negative_entropy, data=rows, global_valid_seqs=seqs, global_valid_toks=toks)


def check_loss(loss_fn: AnyLossFunction, config: PolicyConfig) -> None:
    """Check that a policy prepares the kind of input that a loss needs.

    Raises:
        ConfigError: The policy does not prepare it.
    """
    prepared = [LossInputType.LOGPROB, LossInputType.DISTILLATION, LossInputType.CANDIDATES]
    if config.reward_model_cfg.enabled:
        prepared = [LossInputType.LOGIT, LossInputType.VALUE]
    wanted = input_type_of(loss_fn)
    if wanted not in prepared:
        raise ConfigError(
            f"{type(loss_fn).__name__} wants {wanted} as input; a policy with policy.reward_model_cfg.enabled="
            f"{str(config.reward_model_cfg.enabled).lower()} prepares {' and '.join(map(str, prepared))} only."
        )


def something_counts(valid: tuple[float, float], loss_fn: AnyLossFunction) -> bool:
    """Return whether the loss counts anything in a global batch: a token, or a sequence for a loss of scores."""
    seqs, toks = valid
    return seqs > 0 and (toks > 0 or input_type_of(loss_fn) is LossInputType.LOGIT)


_OF_THE_OPTIMIZER = ("lr", "grad_norm")


def is_count(name: str) -> bool:
    """Return whether a metric is a count, which adds up over updates and batches."""
    return name.startswith(("num_", "global_valid_", "skipped_"))


def mean_weight(name: str, loss_fn: AnyLossFunction) -> str:
    """Return the name of the count that weights a mean: valid tokens for a mean over tokens, or valid sequences.

    If a loss has means of both kinds, its attribute `sequence_means` names those over sequences. The metrics of any
    other loss have the denominator of the loss.
    """
    loss_type = getattr(loss_fn, "loss_type", LossType.TOKEN_LEVEL)
    names = getattr(loss_fn, "sequence_means", None)
    over_sequences = loss_type is LossType.SEQUENCE_LEVEL if names is None else name in names
    return "global_valid_seqs" if over_sequences else "global_valid_toks"


def reduce_metrics(parts: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Join the metrics of parts of one global batch. They are summed, or reduced as extremes (`extreme_of`)."""
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(float(value))
    return {name: float((extreme_of(name) or sum)(numbers)) for name, numbers in values.items()}


def join_updates(updates: Sequence[Mapping[str, float]], loss_fn: AnyLossFunction) -> dict[str, float]:
    """Join the metrics of several optimizer updates as if they were one.

    Args:
        updates: metrics of each update, with `global_valid_seqs` and `global_valid_toks`, not both 0 in all updates.
        loss_fn: the loss; see `mean_weight`.

    Returns:
        Sums of counts, extremes, plain means of `lr` and `grad_norm`, and means over the tokens or sequences of all
        updates.
    """
    joined = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        having = [update for update in updates if name in update]
        values = [update[name] for update in having]
        if is_count(name):
            joined[name] = sum(values)
        elif extreme := extreme_of(name):
            joined[name] = extreme(values)
        elif name in _OF_THE_OPTIMIZER:
            joined[name] = statistics.fmean(values)
        else:
            joined[name] = _weighted_mean(values, [update[mean_weight(name, loss_fn)] for update in having])
    return joined


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Average values. A single value is returned unchanged. If all weights are 0, they count as equal."""
    if len(values) == 1:
        return values[0]
    return statistics.fmean(values, weights if any(weights) else None)
