"""The invariance check finds each kind of dependence that it promises to find."""

import pytest
import torch
from loss_batches import random_batch

from nemo_rl.losses.invariance import check_invariance
from nemo_rl.losses.loss_function import LossInputType, LossType

pytestmark = pytest.mark.fast


class Written:
    """A user's loss made of one function of (logprobs, mask, data, seqs, toks)."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    needs_reference = False

    def __init__(self, formula, metric=None):
        self.formula = formula
        self.metric = metric

    def __call__(self, logprobs, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        loss = self.formula(logprobs, mask, data, global_valid_seqs, global_valid_toks)
        metrics = {} if self.metric is None else self.metric(logprobs.detach(), mask)
        return loss, metrics


def named_batch():
    """Make a float32 batch with a column that is not a tensor."""
    logprobs, data = random_batch(6, 5, masked_rows=[3], dtype=torch.float32)
    return logprobs, data | {"names": list("abcdef")}


def good(logprobs, mask, data, seqs, toks):
    return -(logprobs * mask).sum() / toks


def test_a_correct_loss_passes():
    check_invariance(Written(good), *named_batch())


def test_a_correct_sequence_loss_with_metrics_passes():
    def per_sequence(logprobs, mask, data, seqs, toks):
        means = (logprobs.exp() * mask).sum(1) / mask.sum(1).clamp(min=1)
        return (means * data["sample_mask"]).sum() / seqs

    def metrics(logprobs, mask):
        kept = logprobs[mask != 0]
        extremes = (kept.min(), kept.max()) if len(kept) else (torch.inf, -torch.inf)
        return {"count": mask.sum(), "p_min": extremes[0], "p_max": extremes[1]}

    check_invariance(Written(per_sequence, metrics), *named_batch())


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        (lambda x, m, d, s, t: -(x * m).sum() / m.sum().clamp(min=1), "microbatches of 1 rows"),
        (lambda x, m, d, s, t: -x.sum() / t, "columns of padding"),
        (lambda x, m, d, s, t: -(x * m).sum() / t + x.detach().mean(), "loss with"),
        (
            lambda x, m, d, s, t: -(x * m * torch.arange(len(x))[:, None]).sum() / t,
            "microbatches of 1 rows",
        ),
        (
            lambda x, m, d, s, t: -(x * m).sum() / t + (x.sum() - x.sum().detach()),
            "gradient on",
        ),
    ],
)
def test_dependence_on_the_batch_split_is_found(formula, words):
    with pytest.raises(AssertionError, match=words):
        check_invariance(Written(formula), *named_batch())


def test_a_gradient_that_depends_on_the_microbatch_is_found():
    def formula(x, m, d, s, t):
        return -(x * m).sum() / t + len(x) * ((x * m).sum() - (x * m).sum().detach())

    with pytest.raises(AssertionError, match="gradient with microbatches of 1 rows changes"):
        check_invariance(Written(formula), *named_batch())


def test_a_metric_that_is_a_local_mean_is_found():
    def metrics(logprobs, mask):
        return {"mean": (logprobs * mask).sum() / mask.sum().clamp(min=1)}

    with pytest.raises(AssertionError, match="metric mean with"):
        check_invariance(Written(good, metrics), *named_batch())


def test_a_metric_missing_from_some_microbatches_is_found():
    def metrics(logprobs, mask):
        return {"big": 1.0} if len(logprobs) > 3 else {}

    with pytest.raises(AssertionError, match="metrics with"):
        check_invariance(Written(good, metrics), *named_batch())
