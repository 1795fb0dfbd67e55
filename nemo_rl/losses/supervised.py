"""Define losses with given targets: next token (SFT), teacher's distribution (distillation), value of a state (PPO).

`NLLLossFn` does not clamp values, so a token that counts and has probability 0 makes the loss infinite.

`DistillationLossFn` is the divergence between a teacher's and a student's next-token distributions.
`models.policy.workers.loss_calls` prepares the student's distribution, and the teacher's top-k logits are part of the
batch. Invariants: both distributions have the student's sampling temperature, without top-k and top-p. All values are
in nats, per token of the student's own answer, and divided by the number of tokens of the global batch.

With `S` the teacher's k most likely tokens after a prefix, `q` the softmax of the teacher's logits over `S`, and `p`
the student's softmax over the whole vocabulary:

    zero_outside_topk=false   both sides are restricted to S, p_S = p / p(S)
        forward = sum_S q (log q - log p_S)
        reverse = sum_S p_S (log p_S - log q)
    zero_outside_topk=true    the teacher has no mass outside S, the student may have some
        forward = sum_S q (log q - log p)
        reverse = sum_S p (log p - log q) + sum_outside p (log p - LOG_TEACHER_OUTSIDE)

`mixed` is `w forward + (1 - w) reverse` with `w = mixed_kl_weight`. For k = V, all of these are exact divergences. The
true reverse divergence to a teacher without mass outside `S` is infinite. The finite `LOG_TEACHER_OUTSIDE` pulls the
student's mass strongly into `S`.

Sources: forward KL, Hinton et al. 2015 (arXiv 1503.02531); reverse KL on the student's own samples, MiniLLM (Gu et al.
2023, arXiv 2306.08543); on-policy with either direction, GKD (Agarwal et al. 2023, arXiv 2306.13649).

`MseValueLossFn` is the squared error of a critic, whose steps may be limited. Invariant: a value outside of the mask
affects neither loss nor gradient.

Legend: `B` samples, `T` predicted positions, `k` teacher tokens.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_rl.config import DistillationLossConfig, MseValueLossConfig
from nemo_rl.losses.loss_function import LossData, LossInputType, LossMetrics, LossType
from nemo_rl.losses.reductions import masked_max, masked_mean, masked_min, masked_sum, safe_divide


class NLLLossFn:
    """Mean negative log-likelihood of all tokens that count in the global batch."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    rows_per_unit = 1
    needs_reference = False

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: LossData,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
    ) -> tuple[Tensor, LossMetrics]:
        """Compute `-sum(mask * log p) / global_valid_toks`.

        Args:
            next_token_logprobs: `[B, T-1]`, log-probabilities of tokens 1..T-1.
            data: Holds `token_mask [B, T]` and `sample_mask [B]`.
            global_valid_seqs: Unused. Every loss has this argument.
            global_valid_toks: Number of tokens that count in the global batch.

        Returns:
            Scalar loss, and `loss`, `num_unmasked_tokens`, `num_valid_samples`.
        """
        sample_mask_B = data["sample_mask"].to(next_token_logprobs.dtype)
        mask_BT = data["token_mask"][:, 1:].to(next_token_logprobs.dtype) * sample_mask_B[:, None]
        loss = safe_divide(-masked_sum(next_token_logprobs, mask_BT), global_valid_toks)
        metrics: LossMetrics = {
            "loss": loss.detach(),
            "num_unmasked_tokens": mask_BT.sum(),
            "num_valid_samples": sample_mask_B.sum(),
        }
        return loss, metrics


LOG_TEACHER_OUTSIDE = -100.0
"""Assumed log-probability, in nats, of each token outside of the teacher's top-k."""


TEACHER_WEIGHTS = "teacher_weights"
"""Key of a batch: factors of the distillation loss, of each row `[B]` or of each token `[B, T + 1]`. If it is missing,
all are 1."""


def weights_of_teachers(data: LossData, dtype: torch.dtype, key: str = TEACHER_WEIGHTS) -> Tensor:
    """Return the factor of the loss at each predicted token, `[B, T]`, or `[B, 1]` if the tokens of a row have one."""
    found = data.get(key)
    if found is None:
        return data["sample_mask"].new_ones(len(data["sample_mask"]), 1, dtype=dtype)
    return found.to(dtype)[:, None] if found.ndim == 1 else found[:, 1:].to(dtype)


class DistillationLossFn:
    """Mean divergence over all tokens that count in the global batch."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.DISTILLATION
    rows_per_unit = 1
    needs_reference = False

    def __init__(self, cfg: DistillationLossConfig | Mapping[str, Any]) -> None:
        cfg = DistillationLossConfig.of(cfg)
        self.cfg = cfg
        weights = {"forward": 1.0, "reverse": 0.0}
        self._forward_weight = weights.get(cfg.kl_type, cfg.mixed_kl_weight)

    def __call__(
        self,
        student_topk_logprobs: Tensor,
        teacher_topk_logprobs: Tensor,
        H_all: Tensor | None,
        data: LossData,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
    ) -> tuple[Tensor, LossMetrics]:
        """Compute `kl_loss_weight * sum(mask * weight of the teacher * divergence) / global_valid_toks`.

        Args:
            student_topk_logprobs: `[B, T, k]`, the student's log-probabilities of the teacher's top-k tokens,
                normalised over the whole vocabulary. Without `zero_outside_topk` they may also be normalised over the k
                tokens, or not at all.
            teacher_topk_logprobs: `[B, T, k]`, the teacher's log-probabilities, up to a constant per position.
            H_all: `[B, T]`, `sum p log p` of the student over the whole vocabulary, the negative of its entropy.
                Required for the reverse direction with `zero_outside_topk`.
            data: Holds `token_mask [B, T + 1]` and `sample_mask [B]`, and `teacher_weights` (`TEACHER_WEIGHTS`).
            global_valid_seqs: Unused. Every loss has this argument.
            global_valid_toks: Number of tokens that count in the global batch.

        Returns:
            Scalar loss, and the metrics `loss`, `forward_kl`, `student_topk_mass`, `num_unmasked_tokens` and
            `num_valid_samples`. The last one counts all samples with an answer, also those with `sample_mask` 0, as in
            NeMo RL. If the inputs allow, also `reverse_kl` and `student_entropy`.

        Raises:
            ValueError: `H_all` is required and missing.
        """
        sample_mask_B = data["sample_mask"].to(student_topk_logprobs.dtype)
        mask_BT = data["token_mask"][:, 1:].to(student_topk_logprobs.dtype) * sample_mask_B[:, None]
        log_q_BTk = torch.log_softmax(teacher_topk_logprobs.to(student_topk_logprobs.dtype), dim=-1)
        log_p_BTk = student_topk_logprobs
        if not self.cfg.zero_outside_topk:
            log_p_BTk = torch.log_softmax(student_topk_logprobs, dim=-1)
        forward_BT, reverse_BT = self._divergences(log_p_BTk, log_q_BTk, H_all)

        def mean(values_BT: Tensor) -> Tensor:
            return masked_mean(values_BT, mask_BT, global_normalization_factor=global_valid_toks)

        weight = self._forward_weight
        factor_BT = self.cfg.kl_loss_weight * weights_of_teachers(data, mask_BT.dtype)
        if self.cfg.kl_type == "jensen_shannon":
            loss = mean(factor_BT * self._jensen_shannon(log_p_BTk, log_q_BTk))
        elif reverse_BT is None:
            if weight < 1:
                raise ValueError("DistillationLossFn: zero_outside_topk with a reverse part needs H_all; got None.")
            loss = mean(factor_BT * forward_BT)
        else:
            loss = mean(factor_BT * (weight * forward_BT + (1 - weight) * reverse_BT))
        metrics: LossMetrics = {
            "loss": loss.detach(),
            "forward_kl": mean(forward_BT.detach()),
            "student_topk_mass": mean(student_topk_logprobs.detach().exp().sum(-1)),
            "num_unmasked_tokens": mask_BT.sum(),
            "num_valid_samples": (data["token_mask"][:, 1:] != 0).any(-1).sum(),
        }
        if reverse_BT is not None:
            metrics["reverse_kl"] = mean(reverse_BT.detach())
        if H_all is not None:
            metrics["student_entropy"] = mean(-H_all.detach())
        return loss, metrics

    def _jensen_shannon(self, log_p_BTk: Tensor, log_q_BTk: Tensor) -> Tensor:
        """Return the generalised Jensen-Shannon divergence at each position (GKD, arXiv 2306.13649, section 2).

        It is `w KL(q || m) + (1 - w) KL(p || m)` with `m = w q + (1 - w) p`, teacher q and student p. With
        `zero_outside_topk`, q is 0 outside S, where `p log(p / m) = -p log(1 - w)`.
        """
        weight, p_BTk = self._forward_weight, log_p_BTk.exp()
        log_m_BTk = torch.logaddexp(log_q_BTk + math.log(weight), log_p_BTk + math.log(1 - weight))
        forward_BT = (log_q_BTk.exp() * (log_q_BTk - log_m_BTk)).sum(-1)
        reverse_BT = (p_BTk * (log_p_BTk - log_m_BTk)).sum(-1)
        if self.cfg.zero_outside_topk:
            reverse_BT = reverse_BT - (1 - p_BTk.sum(-1)) * math.log(1 - weight)
        return weight * forward_BT + (1 - weight) * reverse_BT

    def _divergences(
        self, log_p_BTk: Tensor, log_q_BTk: Tensor, H_all_BT: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return forward and reverse divergence at each position. Without `H_all`, the reverse divergence is None."""
        p_BTk = log_p_BTk.exp()
        forward_BT = (log_q_BTk.exp() * (log_q_BTk - log_p_BTk)).sum(-1)
        if not self.cfg.zero_outside_topk:
            return forward_BT, (p_BTk * (log_p_BTk - log_q_BTk)).sum(-1)
        if H_all_BT is None:
            return forward_BT, None
        # # H_all includes the whole vocabulary, so tokens outside S need no separate terms.
        cross_BT = (p_BTk * log_q_BTk).sum(-1) + (1 - p_BTk.sum(-1)) * LOG_TEACHER_OUTSIDE
        return forward_BT, H_all_BT - cross_BT


class MseValueLossFn:
    """Mean squared difference between values and returns, over tokens.

    V is the value of a token's state, V_old its value before the updates of the step, and R the token's return:

        scale * 1/2 * max((V - R)^2, (clip(V, V_old - cliprange, V_old + cliprange) - R)^2)

    Without `cliprange` the loss is `scale * 1/2 * (V - R)^2`. Because of the maximum, a value that has moved away from
    its return keeps its gradient. A value that has moved towards its return by more than `cliprange` has no gradient.

    Args:
        cfg: The section `value_loss_fn`. A dict is checked, and missing values get their defaults.

    Raises:
        ConfigError: A value is out of range.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.VALUE
    needs_reference = False
    rows_per_unit = 1

    def __init__(self, cfg: MseValueLossConfig | Mapping[str, Any]) -> None:
        self.cfg = MseValueLossConfig.of(cfg)

    def __call__(
        self,
        values: Tensor,
        data: LossData,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
    ) -> tuple[Tensor, LossMetrics]:
        """Compute loss and metrics of one microbatch.

        Args:
            values: `[B, T-1]`, values of the states before tokens 1..T-1.
            data: Holds `values` (those before the updates of the step), `returns` and `token_mask` `[B, T]`, and
                `sample_mask [B]`.
            global_valid_seqs: Unused. Every loss has this argument.
            global_valid_toks: Number of tokens that count in the global batch.

        Returns:
            Scalar loss, and the metrics `loss`, `vf_clipfrac` (share of the tokens without a gradient because of
            `cliprange`), `values_mean`, `values_min` and `values_max` of the current values, and `num_valid_samples`.
        """
        mask_B = data["sample_mask"].to(values.dtype)
        mask_BT = data["token_mask"][:, 1:].to(values.dtype) * mask_B[:, None]
        values_BT, returns_BT, old_BT = (
            torch.where(mask_BT != 0, each_BT, 0.0)
            for each_BT in (values, _shifted(data["returns"], values), _shifted(data["values"], values))
        )
        error_BT = (values_BT - returns_BT).square()
        worst_BT = error_BT
        if self.cfg.cliprange is not None:
            # # Clamping the value and not its change keeps a value within the bounds bit for bit.
            limited_BT = values_BT.clamp(old_BT - self.cfg.cliprange, old_BT + self.cfg.cliprange)
            worst_BT = torch.maximum(error_BT, (limited_BT - returns_BT).square())

        def mean(each_BT: Tensor) -> Tensor:
            return masked_mean(each_BT, mask_BT, None, global_valid_toks)

        loss = self.cfg.scale * 0.5 * mean(worst_BT)
        current_BT = values_BT.detach()
        return loss, {
            "loss": loss.detach(),
            "vf_clipfrac": mean((worst_BT > error_BT).to(values.dtype)),
            "values_mean": mean(current_BT),
            "values_min": masked_min(current_BT, mask_BT),
            "values_max": masked_max(current_BT, mask_BT),
            "num_valid_samples": mask_B.sum(),
        }


def _shifted(each_BT: Tensor, like: Tensor) -> Tensor:
    """Return the entries of tokens 1..T-1 in the dtype of the values."""
    return each_BT[:, 1:].to(like.dtype)
