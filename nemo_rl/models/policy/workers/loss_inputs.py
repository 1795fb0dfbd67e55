"""Build the inputs that a loss declares in `input_type`, and call the loss on the model's output.

`base.PolicyWorker.train` builds inputs before the forward and calls the loss after it; `lm_policy` checks the keys that
a batch needs. Invariant: losses of one input type receive the same tensors in the same places, whatever the layout, the
ranks and the backend.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.loss_function import (
    AnyLossFunction,
    LossFunction,
    LossInputType,
    LossMetrics,
    TopkLossFunction,
)
from nemo_rl.models.training.inputs import (
    InputLayout,
    ModelInputs,
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
}


def input_type_of(loss_fn: AnyLossFunction) -> LossInputType:
    """Return the input type of a loss; log-probabilities if a user's own loss declares none."""
    return getattr(loss_fn, "input_type", LossInputType.LOGPROB)


def extra_keys(loss_fn: AnyLossFunction) -> tuple[str, ...]:
    """Return the keys that this loss needs in addition to those of every training batch."""
    keys = ["reference_policy_logprobs"] if getattr(loss_fn, "needs_reference", False) else []
    if input_type_of(loss_fn) is LossInputType.DISTILLATION:
        keys += ["teacher_topk_logits", "teacher_topk_indices"]
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
        loss_fn: the loss. It receives `[b, T - 1]` log-probabilities or values, or `[b, 1]` scores of sequences. For
            distillation it receives the student's log-probabilities of the teacher's top-k tokens `[b, T - 1, k]`,
            those of the teacher, normalised over these k, and the student's negative entropy over the whole
            vocabulary `[b, T - 1]`.
        inputs: inputs of the forward.
        scores: `[K]`, or `[K, k]` for distillation.
        entropy_K: entropy of each distribution.
        rows: the microbatch, on the model's device.
        global_valid: valid sequences and valid tokens of the whole global batch.
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
    """Check that a policy prepares the input that a loss wants.

    Raises:
        ConfigError: it does not.
    """
    prepared = [LossInputType.LOGPROB, LossInputType.DISTILLATION]
    if config.reward_model_cfg.enabled:
        prepared = [LossInputType.LOGIT, LossInputType.VALUE]
    wanted = input_type_of(loss_fn)
    if wanted not in prepared:
        raise ConfigError(
            f"{type(loss_fn).__name__} wants {wanted} as input; a policy with policy.reward_model_cfg.enabled="
            f"{str(config.reward_model_cfg.enabled).lower()} prepares {' and '.join(map(str, prepared))} only."
        )


def something_counts(valid: tuple[float, float], loss_fn: AnyLossFunction) -> bool:
    """Return whether a global batch has anything that its loss counts: tokens, or sequences for a loss of scores."""
    seqs, toks = valid
    return seqs > 0 and (toks > 0 or input_type_of(loss_fn) is LossInputType.LOGIT)
