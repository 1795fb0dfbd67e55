"""Validation of scores and steps: errors, correlations against NumPy, and the first wrong step."""

import math

import numpy as np
import pytest
import torch

from nemo_rl.algorithms.answer_scores import (
    RegressionValidator,
    ScoreCounts,
    StepValidator,
    correlation,
    first_wrong,
    loss_weights,
    ranks,
)
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.rewards import RegressionLossFn, StepLossFn

pytestmark = pytest.mark.fast


class Scorer:
    """A model whose outputs are columns of the batch."""

    def score(self, data, micro_batch_size=None):
        return BatchedDataDict(scores=data["scores"].squeeze(-1))

    def get_values(self, data, micro_batch_size=None):
        return BatchedDataDict(values=data["values"])


def test_correlations_equal_those_of_numpy():
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=40), rng.integers(0, 5, 40).astype(float)
    y[:20] += np.round(x[:20])
    want = np.corrcoef(x, y)[0, 1]
    assert correlation(torch.tensor(x), torch.tensor(y)) == pytest.approx(want, abs=1e-12)
    mean_ranks = np.array([np.mean([1 + np.sum(y < v) + k for k in range(np.sum(y == v))]) for v in y])
    assert np.allclose(ranks(torch.tensor(y)).numpy(), mean_ranks)
    of_x = np.argsort(np.argsort(x)) + 1.0
    spearman = correlation(ranks(torch.tensor(x)), ranks(torch.tensor(y)))
    assert spearman == pytest.approx(np.corrcoef(of_x, mean_ranks)[0, 1], abs=1e-12)


@pytest.mark.parametrize("values", [[], [1.0], [2.0, 2.0, 2.0]])
def test_an_undefined_correlation_is_0(values):
    assert correlation(torch.tensor(values), torch.arange(float(len(values)))) == 0.0
    assert correlation(torch.arange(float(len(values))), torch.tensor(values)) == 0.0


def scored(scores, targets, sample_mask):
    wanted = torch.tensor(targets)
    return BatchedDataDict(
        scores=torch.tensor(scores),
        target_scores=wanted.nan_to_num(0.0),
        score_mask=(~wanted.isnan()).float(),
        sample_mask=torch.tensor(sample_mask),
    )


def test_a_validation_of_scores_has_the_numbers_of_all_rows_together():
    nan = math.nan
    first = scored([[1.0, 4.0], [2.0, 0.0], [9.0, 9.0]], [[2.0, 3.0], [4.0, nan], [0.0, 0.0]], [1.0, 1.0, 0.0])
    second = scored([[3.0, 1.0]], [[1.0, 3.0]], [1.0])
    loss_fn = RegressionLossFn({"a": 1.0, "b": 3.0})
    found = RegressionValidator([first, second], Scorer(), loss_fn)(step=0)
    mse_a, mse_b = (1 + 4 + 4) / 3, (1 + 4) / 2
    assert found["loss"] == pytest.approx((mse_a + 3 * mse_b) / 4)
    assert (found["mae_a"], found["mae_b"]) == pytest.approx((5 / 3, 1.5))
    assert found["pearson_a"] == pytest.approx(np.corrcoef([1, 2, 3], [2, 4, 1])[0, 1])
    assert found["spearman_a"] == pytest.approx(np.corrcoef([1, 2, 3], [2, 3, 1])[0, 1])
    assert found["pearson_b"] == 0.0, "all targets are equal"
    assert found["num_valid_samples"] == 3


def test_one_score_has_no_axis_of_scores():
    batch = scored([[1.0], [3.0]], [[2.0], [5.0]], [1.0, 1.0])
    found = RegressionValidator([batch], Scorer(), RegressionLossFn({"a": 1.0}))(step=0)
    assert found["loss"] == pytest.approx((1 + 4) / 2) and found["pearson_a"] == pytest.approx(1.0)


def test_scores_are_counted_before_a_batch_is_divided():
    batch = scored([[0.0, 0.0]] * 3, [[1.0, math.nan], [1.0, 2.0], [3.0, 4.0]], [1.0, 1.0, 0.0])
    step = StepBatch(batch)
    assert ScoreCounts().apply(step) == {}
    assert step.tensors["score_counts"].tolist() == [[2.0, 1.0]] * 3


def test_weights_have_the_order_of_the_scores():
    assert loss_weights(["b", "a"], {"a": 0.5}) == {"b": 1.0, "a": 0.5}


def steps(values, labels, counts=1.0):
    """Return one row whose steps end before tokens 1, 2, ..."""
    width = 5
    row = {name: torch.zeros(1, width) for name in ("values", "step_labels", "token_mask")}
    places = list(range(1, 1 + len(values)))
    row["values"][0, places] = torch.tensor(values)
    row["step_labels"][0, places] = torch.tensor(labels)
    row["token_mask"][0, places] = 1.0
    return BatchedDataDict(**row, sample_mask=torch.tensor([counts]))


def test_a_validation_of_steps_finds_the_first_wrong_step():
    batches = [
        steps([2.0, -1.0, -3.0], [1.0, 0.0, 0.0]),  # found
        steps([2.0, 1.0, -3.0], [1.0, 0.0, 0.0]),  # found one step too late
        steps([2.0, 1.0], [1.0, 1.0]),  # right
        steps([-2.0, 1.0], [1.0, 1.0]),  # a false alarm
        steps([-2.0, 1.0, 3.0, 1.0], [0.0, 1.0, 1.0, 1.0]),  # found
        steps([5.0], [0.0], counts=0.0),
    ]
    found = StepValidator(batches, Scorer(), StepLossFn())(step=0)
    flat = [(s, y) for batch in batches[:5] for s, y in zip(*pairs(batch), strict=True)]
    assert found["loss"] == pytest.approx(sum(math.log1p(math.exp(-s if y else s)) for s, y in flat) / len(flat))
    assert found["accuracy"] == pytest.approx(12 / 14)
    of_wrong, of_right = 2 / 3, 1 / 2
    assert (found["first_error_accuracy"], found["no_error_accuracy"]) == pytest.approx((of_wrong, of_right))
    assert found["first_error_f1"] == pytest.approx(2 * of_wrong * of_right / (of_wrong + of_right))
    assert (found["num_steps"], found["num_valid_samples"]) == (14, 5)


def pairs(batch):
    chosen = batch["token_mask"][0] > 0
    return batch["values"][0, chosen].tolist(), batch["step_labels"][0, chosen].tolist()


def test_an_answer_without_a_wrong_step_has_none():
    assert first_wrong(torch.tensor([True, True])) == 2
    assert first_wrong(torch.tensor([False, True])) == 0


def test_a_validation_without_rows_has_no_steps():
    found = StepValidator([steps([1.0], [1.0], counts=0.0)], Scorer(), StepLossFn())(step=0)
    assert found["first_error_f1"] == 0.0 and found["num_valid_samples"] == 0 and "loss" not in found
