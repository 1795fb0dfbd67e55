"""The loss of distillation: the divergence between a teacher's and a student's next-token distributions.

`models.policy.workers.loss_inputs` prepares the student's side; the teacher's top-k logits are part of the batch.
Invariant: both sides have the temperature that the student samples with, without top-k and top-p; all values are in
nats, per token of the student's own answer, and divided by the tokens of the global batch.

With `S` the teacher's k most likely tokens after a prefix, `q` the softmax of the teacher's logits over `S`, and `p`
the student's softmax over the whole vocabulary:

    zero_outside_topk=false   both sides are restricted to S, p_S = p / p(S)
        forward = sum_S q (log q - log p_S)
        reverse = sum_S p_S (log p_S - log q)
    zero_outside_topk=true    the teacher has no mass outside S, the student may have some
        forward = sum_S q (log q - log p)
        reverse = sum_S p (log p - log q) + sum_outside p (log p - LOG_TEACHER_OUTSIDE)

`mixed` is `w forward + (1 - w) reverse` with `w = mixed_kl_weight`. For k = V all of them are the exact divergences.
The true reverse divergence to a teacher without mass outside `S` is infinite; the finite `LOG_TEACHER_OUTSIDE` pulls
the student's mass strongly into `S`.

Sources: forward KL, Hinton et al. 2015 (arXiv 1503.02531); reverse KL on the student's own samples, MiniLLM
(Gu et al. 2023, arXiv 2306.08543); on-policy with either direction, GKD (Agarwal et al. 2023, arXiv 2306.13649).

Legend: `B` samples, `T` predicted positions, `k` teacher tokens.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_rl.config import DistillationLossConfig
from nemo_rl.losses.loss_function import LossData, LossInputType, LossMetrics, LossType
from nemo_rl.losses.reductions import masked_mean

LOG_TEACHER_OUTSIDE = -100.0
"""Log-probability in nats that the teacher is taken to give each token outside of its top-k."""


class DistillationLossFn:
    """Mean divergence over all tokens that count in the global batch; see the module docstring."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.DISTILLATION
    rows_per_unit = 1
    needs_reference = False

    def __init__(self, cfg: DistillationLossConfig | Mapping[str, Any]) -> None:
        cfg = DistillationLossConfig.of(cfg)
        self.cfg = cfg
        weights = {"forward": 1.0, "reverse": 0.0, "mixed": cfg.mixed_kl_weight}
        self._forward_weight = weights[cfg.kl_type]

    def __call__(
        self,
        student_topk_logprobs: Tensor,
        teacher_topk_logprobs: Tensor,
        H_all: Tensor | None,
        data: LossData,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
    ) -> tuple[Tensor, LossMetrics]:
        """Compute `sum(mask * divergence) / global_valid_toks`.

        Args:
            student_topk_logprobs: `[B, T, k]`, the student's log-probabilities of the teacher's top-k tokens,
                normalised over the whole vocabulary. Without `zero_outside_topk` they may also be normalised
                over the k tokens, or not at all.
            teacher_topk_logprobs: `[B, T, k]`, the teacher's, up to a constant per position.
            H_all: `[B, T]`, `sum p log p` of the student over the whole vocabulary, the negative of its entropy;
                needed for the reverse direction with `zero_outside_topk`.
            data: Holds `token_mask [B, T + 1]` and `sample_mask [B]`.
            global_valid_seqs: Unused; part of the call of every loss.
            global_valid_toks: Tokens that count in the whole global batch.

        Returns:
            Scalar loss, and `loss`, `forward_kl`, `reverse_kl`, `student_topk_mass`, `student_entropy` (the last
            three where the inputs allow), `num_unmasked_tokens`, and `num_valid_samples`: all samples with an
            answer, also those with `sample_mask` 0, as in NeMo RL.

        Raises:
            ValueError: `H_all` is needed and missing.
        """
        sample_mask_B = data["sample_mask"].to(student_topk_logprobs.dtype)
        mask_BT = data["token_mask"][:, 1:].to(student_topk_logprobs.dtype) * sample_mask_B[:, None]
        forward_BT, reverse_BT = self._divergences(student_topk_logprobs, teacher_topk_logprobs, H_all)

        def mean(values_BT: Tensor) -> Tensor:
            return masked_mean(values_BT, mask_BT, global_normalization_factor=global_valid_toks)

        weight = self._forward_weight
        if reverse_BT is None:
            if weight < 1:
                raise ValueError("DistillationLossFn: zero_outside_topk with a reverse part needs H_all; got None.")
            loss = mean(forward_BT)
        else:
            loss = mean(weight * forward_BT + (1 - weight) * reverse_BT)
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

    def _divergences(
        self, student_BTk: Tensor, teacher_BTk: Tensor, H_all_BT: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return forward and reverse divergence at each position; None for a reverse one that lacks `H_all`."""
        log_q_BTk = torch.log_softmax(teacher_BTk.to(student_BTk.dtype), dim=-1)
        log_p_BTk = student_BTk if self.cfg.zero_outside_topk else torch.log_softmax(student_BTk, dim=-1)
        p_BTk = log_p_BTk.exp()
        forward_BT = (log_q_BTk.exp() * (log_q_BTk - log_p_BTk)).sum(-1)
        if not self.cfg.zero_outside_topk:
            return forward_BT, (p_BTk * (log_p_BTk - log_q_BTk)).sum(-1)
        if H_all_BT is None:
            return forward_BT, None
        # H_all covers all of V, so tokens outside S need no separate terms.
        cross_BT = (p_BTk * log_q_BTk).sum(-1) + (1 - p_BTk.sum(-1)) * LOG_TEACHER_OUTSIDE
        return forward_BT, H_all_BT - cross_BT
