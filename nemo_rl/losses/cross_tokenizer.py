"""Compare next-token distributions of a student and a teacher whose tokenizers differ.

    student  |1|3|+|   candidates: token ids of the student, each in a slot ─► log P of each slot ┐
    teacher  |13|+|    slots: classes of tokens that both models know       ─► log Q of each slot ┴► divergence

`algorithms.teaching` finds the texts that end between two tokens of both (spans), and the classes. At the beginning of
each span the two models have read the same text, so their distributions over classes can be compared there. The text of
a span with several tokens is an outcome of its own, whose probability is the product over its tokens, and this product
is taken away from the class of the span's first token. All that is in no slot is one more outcome, the rest. So the
outcomes of both sides exclude each other, their probabilities add up to 1, and the divergence is at least 0.

Tokens in no class (GOLD, Hugging Face 2025) are also compared by size: the distance of the sorted probabilities,
`sum_i |p_(i) - q_(i)|`, which is the universal logit distillation of Boizard et al. 2024 (arXiv 2402.12030).

Invariant: with equal tokens and spans of one token, the slots are the tokens, and the divergence is that of
`losses.supervised`.

Legend: `B` rows, `T` predicted positions, `K` candidates, `C` slots, `U` tokens in no class.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_rl.config import DistillationLossConfig
from nemo_rl.losses.loss_function import LossData, LossInputType, LossMetrics, LossType
from nemo_rl.losses.reductions import masked_mean
from nemo_rl.losses.supervised import TEACHER_WEIGHTS, weights_of_teachers

NOWHERE, IN_NO_CLASS = -1, -2
"""Values of `candidate_slots`, besides numbers of slots: not compared, and compared by size."""
NO_SPAN, WITHOUT_SLOT = -1, -2
"""Values of `span_slots`, besides numbers of slots: the text of the span is no outcome of its own; it is one, and the
class of its first token has no slot."""
LEAST_LOGPROB = -100.0
"""Smallest log-probability of an outcome, in nats, so that the divergence is finite."""
COLUMNS: Mapping[str, float] = {
    "candidate_ids": 0,
    "candidate_slots": NOWHERE,
    "candidate_log_weights": 0.0,
    "teacher_slots": -math.inf,
    "teacher_sorted": 0.0,
    "span_starts": -1,
    "span_slots": NO_SPAN,
    "span_logprobs": 0.0,
}
"""Keys of a batch that the loss needs, with the value of entries that are not used (`CrossTokenizerLossFn`)."""


def of_teacher(column: str, number: int) -> str:
    """Return the key of a column of one of several teachers. The first teacher has the plain names."""
    return column if number == 0 else f"{column}.{number}"


def candidates_of(rows: Mapping[str, Any]) -> Tensor:
    """Return the candidates of all teachers of a batch, concatenated, `[B, T, K]` int64."""
    found = [rows["candidate_ids"]]
    while (key := of_teacher("candidate_ids", len(found))) in rows:
        found.append(rows[key])
    return torch.cat(found, dim=-1)


class CrossTokenizerLossFn:
    """Mean divergence over the tokens that count in the global batch. Only first tokens of spans have one."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.CANDIDATES
    rows_per_unit = 1
    needs_reference = False

    def __init__(
        self, cfg: DistillationLossConfig | Mapping[str, Any], ce_loss_scale: float = 0.0, num_teachers: int = 1
    ) -> None:
        self.cfg = DistillationLossConfig.of(cfg)
        self.ce_loss_scale = ce_loss_scale
        self.num_teachers = num_teachers

    def __call__(
        self,
        candidate_logprobs: Tensor,
        data: LossData,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
    ) -> tuple[Tensor, LossMetrics]:
        """Compute the mean of `kl_loss_weight * divergence + uncommon_loss_weight * distance - ce_loss_scale * log p`.

        The mean is over all tokens that count. Divergence and distance are 0 where no span begins, and have the factor
        that the teacher has at the first token of the span (`supervised.TEACHER_WEIGHTS`). With several teachers they
        are added, and their metrics are averaged.

        Args:
            candidate_logprobs: `[B, T, K]`, the student's log-probabilities of the candidates, normalised over the
                whole vocabulary. Column 0 is the next token of the row. With several teachers, their candidates are
                concatenated.
            data: Holds `token_mask [B, T + 1]`, `sample_mask [B]`, and the following columns of each teacher
                (`of_teacher`). A position belongs to the distribution after a token.

                - `candidate_ids [B, T + 1, K]`, `candidate_slots`: the slot of each candidate, or a constant above.
                - `candidate_log_weights`: logarithm of the share of the candidate's probability that the slot gets.
                - `teacher_slots [B, T + 1, C]`: the teacher's log-probability of each slot, without the text of the
                  span, or -inf for a slot that does not exist.
                - `teacher_sorted [B, T + 1, U]`: the teacher's largest probabilities of tokens in no class, in falling
                  order.
                - `span_starts [B, T + 1]`: the position at which the span of the next token begins, or -1.
                - `span_slots`: the slot of the class of the span's first token, or a constant above.
                - `span_logprobs`: the teacher's log-probability of the text of the span.
            global_valid_seqs: Unused. Every loss has this argument.
            global_valid_toks: Number of tokens that count in the global batch.

        Returns:
            Scalar loss, and the metrics `loss`, `nll` (of the next tokens of the rows), `forward_kl`, `reverse_kl`,
            `unmatched_distance`, `matched_mass` (the student's probability in slots and of the span's text),
            `spans_per_token`, `num_unmasked_tokens` and `num_valid_samples`.
        """
        dtype = candidate_logprobs.dtype
        counted_BT = data["token_mask"][:, 1:].to(dtype) * data["sample_mask"].to(dtype)[:, None]

        def mean(values_BT: Tensor) -> Tensor:
            return masked_mean(values_BT, counted_BT, global_normalization_factor=global_valid_toks)

        nll = mean(-candidate_logprobs[..., 0])
        loss, metrics = self.ce_loss_scale * nll, dict[str, Tensor]()
        widths = [data[of_teacher("candidate_ids", number)].shape[-1] for number in range(self.num_teachers)]
        for number, logprobs_BTk in enumerate(candidate_logprobs.split(widths, dim=-1)):
            weight_BT = weights_of_teachers(data, dtype, of_teacher(TEACHER_WEIGHTS, number))
            trained_BT, reported = self._of_teacher(logprobs_BTk, data, number)
            loss = loss + mean(trained_BT * weight_BT)
            for name, values_BT in reported.items():
                share = mean(values_BT.detach()) / self.num_teachers
                metrics[name] = metrics[name] + share if name in metrics else share
        return loss, {
            "loss": loss.detach(),
            "nll": nll.detach(),
            **metrics,
            "num_unmasked_tokens": counted_BT.sum(),
            "num_valid_samples": (data["token_mask"][:, 1:] != 0).any(-1).sum(),
        }

    def _of_teacher(self, logprobs_BTK: Tensor, data: LossData, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of one teacher at each position `[B, T]`, which is 0 where no span begins, and metrics."""
        columns = {name: data[of_teacher(name, number)][:, :-1] for name in COLUMNS}
        columns["span_starts"] = columns["span_starts"].where(data["token_mask"][:, 1:] != 0, NO_SPAN)
        is_start_BT = _is_start(columns["span_starts"])
        log_p_BTO, log_q_BTO, exists_BTO = outcomes(logprobs_BTK, columns)
        forward_BT, reverse_BT, divergence_BT = self._divergences(log_p_BTO, log_q_BTO, exists_BTO)
        distance_BT = sorted_distance(logprobs_BTK, columns["candidate_slots"], columns["teacher_sorted"])
        trained_BT = self.cfg.kl_loss_weight * divergence_BT + self.cfg.uncommon_loss_weight * distance_BT
        reported = {
            "forward_kl": forward_BT,
            "reverse_kl": reverse_BT,
            "unmatched_distance": distance_BT,
            "matched_mass": torch.where(exists_BTO, log_p_BTO.exp(), 0.0)[..., :-1].sum(-1),
            "spans_per_token": torch.ones_like(forward_BT),
        }
        return torch.where(is_start_BT, trained_BT, 0.0), {
            name: torch.where(is_start_BT, values_BT, 0.0) for name, values_BT in reported.items()
        }

    def _divergences(self, log_p_BTO: Tensor, log_q_BTO: Tensor, exists_BTO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return forward, reverse and trained divergence `[B, T]` of distributions over outcomes."""

        def expected(log_weights_BTO: Tensor, terms_BTO: Tensor) -> Tensor:
            return torch.where(exists_BTO, log_weights_BTO.exp() * terms_BTO, 0.0).sum(-1)

        kind, weight = self.cfg.kl_type, self.cfg.mixed_kl_weight
        forward_BT = expected(log_q_BTO, log_q_BTO - log_p_BTO)
        reverse_BT = expected(log_p_BTO, log_p_BTO - log_q_BTO)
        if kind == "jensen_shannon":
            log_m_BTO = torch.logaddexp(log_q_BTO + math.log(weight), log_p_BTO + math.log(1 - weight))
            of_teacher_BT = expected(log_q_BTO, log_q_BTO - log_m_BTO)
            of_student_BT = expected(log_p_BTO, log_p_BTO - log_m_BTO)
            return forward_BT, reverse_BT, weight * of_teacher_BT + (1 - weight) * of_student_BT
        weight = {"forward": 1.0, "reverse": 0.0}.get(kind, weight)
        return forward_BT, reverse_BT, weight * forward_BT + (1 - weight) * reverse_BT


def _is_start(span_starts_BT: Tensor) -> Tensor:
    """Return a bool mask `[B, T]` of the positions at which a span begins."""
    positions_T = torch.arange(span_starts_BT.shape[1], device=span_starts_BT.device)
    return span_starts_BT == positions_T


def outcomes(candidate_logprobs_BTK: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of all outcomes at each position, for student and teacher.

    Args:
        candidate_logprobs_BTK: The student's log-probabilities of the candidates.
        columns: The columns `COLUMNS` at the same positions.

    Returns:
        The student's log-probabilities `[B, T, C + 2]` of the slots, the text of the span, and the rest; those of the
        teacher; and a mask of the outcomes that exist. Other outcomes have log-probability 0.
    """
    log_q_BTC = columns["teacher_slots"].to(candidate_logprobs_BTK.dtype)
    exists_BTC, span_slots_BT = log_q_BTC > -math.inf, columns["span_slots"]
    log_p_BTC = _slot_logprobs(candidate_logprobs_BTK, columns, exists_BTC)
    span_BT = _span_logprobs(candidate_logprobs_BTK[..., 0], columns["span_starts"])
    slots_C = torch.arange(log_q_BTC.shape[-1], device=log_q_BTC.device)
    of_span_BTC = (span_slots_BT[..., None] == slots_C) & exists_BTC
    log_p_BTC = torch.where(of_span_BTC, without(log_p_BTC, span_BT[..., None], of_span_BTC), log_p_BTC)
    is_outcome_BT = span_slots_BT != NO_SPAN
    exists_BTO = torch.cat([exists_BTC, is_outcome_BT[..., None]], -1)
    log_p_BTO = torch.cat([log_p_BTC, span_BT[..., None]], -1)
    log_q_BTO = torch.cat([log_q_BTC, columns["span_logprobs"].to(log_q_BTC.dtype)[..., None]], -1)
    log_p_BTO, log_q_BTO = (_with_rest(each, exists_BTO) for each in (log_p_BTO, log_q_BTO))
    return log_p_BTO, log_q_BTO, torch.cat([exists_BTO, torch.ones_like(exists_BTO[..., :1])], -1)


def _slot_logprobs(logprobs_BTK: Tensor, columns: Mapping[str, Tensor], exists_BTC: Tensor) -> Tensor:
    """Return the student's log-probability of each slot `[B, T, C]`, the sum over its candidates, or 0."""
    num_slots = exists_BTC.shape[-1]
    slots_BTK = columns["candidate_slots"]
    slots_BTK = slots_BTK.where(slots_BTK >= 0, num_slots)  # a last slot, which is dropped
    shares_BTK = logprobs_BTK + columns["candidate_log_weights"].to(logprobs_BTK.dtype)
    shape = (*logprobs_BTK.shape[:-1], num_slots + 1)
    largest = logprobs_BTK.new_full(shape, -math.inf).scatter_reduce(-1, slots_BTK, shares_BTK.detach(), "amax")
    # # An existing slot has at least one candidate, so its largest share is finite.
    largest = largest.where(largest > -math.inf, 0.0)
    sums = logprobs_BTK.new_zeros(shape).scatter_add(-1, slots_BTK, (shares_BTK - largest.gather(-1, slots_BTK)).exp())
    tiny = torch.finfo(sums.dtype).tiny  # rows that only fill a microbatch have slots without candidates
    return torch.where(exists_BTC, sums[..., :-1].clamp(min=tiny).log() + largest[..., :-1], 0.0)


def _span_logprobs(next_BT: Tensor, span_starts_BT: Tensor) -> Tensor:
    """Return the student's log-probability of each span's text at its first position, and 0 elsewhere."""
    inside_BT = span_starts_BT >= 0
    return torch.zeros_like(next_BT).scatter_add(1, span_starts_BT.clamp(min=0), torch.where(inside_BT, next_BT, 0.0))


def without(whole: Tensor, part: Tensor, where: Tensor) -> Tensor:
    """Return `log(exp(whole) - exp(part))`, at least `LEAST_LOGPROB`, where the mask is True. Other entries are 0."""
    smallest = torch.finfo(whole.dtype).eps
    difference = torch.where(where, part - whole, -1.0).clamp(max=-smallest)
    found: Tensor = torch.where(where, whole, 0.0) + torch.log(-torch.expm1(difference))
    return torch.where(where, found.clamp(min=LEAST_LOGPROB), 0.0)


def _with_rest(logprobs: Tensor, exists: Tensor) -> Tensor:
    """Append the log-probability of all that is in no other outcome. Entries that do not exist become 0."""
    total = torch.where(exists, logprobs, -math.inf).exp().sum(-1, keepdim=True)
    rest = (1 - total).clamp(min=torch.finfo(logprobs.dtype).eps).log()
    return torch.cat([torch.where(exists, logprobs, 0.0), rest], -1)


def sorted_distance(logprobs_BTK: Tensor, slots_BTK: Tensor, teacher_sorted_BTU: Tensor) -> Tensor:
    """Return the sum of the differences `[B, T]` of sorted probabilities of the tokens in no class.

    Args:
        logprobs_BTK: The student's log-probabilities.
        slots_BTK: Slots of the candidates. There are at most `U` in no class at a position.
        teacher_sorted_BTU: The teacher's probabilities, in falling order.
    """
    num_kept = teacher_sorted_BTU.shape[-1]
    if not num_kept:
        return logprobs_BTK.new_zeros(logprobs_BTK.shape[:-1])
    probs_BTK = torch.where(slots_BTK == IN_NO_CLASS, logprobs_BTK, -math.inf).exp()
    missing = max(num_kept - probs_BTK.shape[-1], 0)
    probs_BTU = torch.nn.functional.pad(probs_BTK, (0, missing)).topk(num_kept, dim=-1).values
    return (probs_BTU - teacher_sorted_BTU.to(probs_BTU.dtype)).abs().sum(-1)
