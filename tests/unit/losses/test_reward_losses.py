"""Losses of scores and of labelled steps against sums written out by hand, and against transformers and torch."""

import math

import pytest
import torch

from nemo_rl.distributed.parallel_logprobs import initial_head, scalar_outputs
from nemo_rl.losses.invariance import check_invariance
from nemo_rl.losses.rewards import RegressionLossFn, StepLossFn

pytestmark = pytest.mark.fast

WEIGHTS = {"helpfulness": 2.0, "verbosity": 0.5, "unused": 0.0}


def scored_batch():
    """Make six rows with three scores, of which one row does not count and some scores are missing."""
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]], dtype=torch.float64)
    sample_mask = torch.tensor([1.0, 1, 1, 0, 1, 1], dtype=torch.float64)
    targets = 4 * torch.rand(6, 3, generator=generator, dtype=torch.float64)
    targets[mask == 0] = math.nan
    counts = (mask * sample_mask[:, None]).sum(0).repeat(6, 1)
    return scores, {
        "sample_mask": sample_mask,
        "target_scores": targets,
        "score_mask": mask,
        "score_counts": counts,
    }


def by_hand(scores, data):
    """Return the weighted mean over attributes of the mean squared error over rows, and mean absolute errors."""
    squared, absolute = [], []
    for attribute in range(3):
        rows = [row for row in range(6) if data["sample_mask"][row] and data["score_mask"][row, attribute]]
        errors = [float(scores[row, attribute] - data["target_scores"][row, attribute]) for row in rows]
        squared.append(sum(error**2 for error in errors) / len(errors))
        absolute.append(sum(map(abs, errors)) / len(errors))
    loss = sum(w * error for w, error in zip(WEIGHTS.values(), squared, strict=True)) / sum(WEIGHTS.values())
    return loss, squared, absolute


@pytest.mark.parametrize("shape", [(6, 3), (6, 1, 3)])
def test_the_error_of_each_score_is_averaged_over_the_rows_that_have_it(shape):
    scores, data = scored_batch()
    leaf = scores.reshape(shape).clone().requires_grad_(True)
    loss, metrics = RegressionLossFn(WEIGHTS)(leaf, data=data, global_valid_seqs=5)
    loss.backward()
    want, squared, absolute = by_hand(scores, data)
    assert loss.item() == pytest.approx(want, rel=1e-12)
    for index, name in enumerate(WEIGHTS):
        assert float(metrics[f"mse_{name}"]) == pytest.approx(squared[index], rel=1e-12)
        assert float(metrics[f"mae_{name}"]) == pytest.approx(absolute[index], rel=1e-12)
    gradient = leaf.grad.reshape(6, 3)
    assert torch.isfinite(gradient).all() and not gradient[data["score_mask"] == 0].any()
    assert not gradient[3].any() and not gradient[:, 2].any()
    assert gradient[0, 0].item() == pytest.approx(
        2 * float(scores[0, 0] - data["target_scores"][0, 0]) / 4 * 2.0 / 2.5, rel=1e-12
    )


def test_the_loss_of_scores_does_not_depend_on_the_division():
    scores, data = scored_batch()
    data["target_scores"] = data["target_scores"].nan_to_num(7.0)
    check_invariance(RegressionLossFn(WEIGHTS), scores, data)
    one = {name: value[:, :1] if value.dim() > 1 else value for name, value in data.items()}
    check_invariance(RegressionLossFn({"helpfulness": 1.0}), scores[:, :1], one)


def test_a_batch_without_a_score_has_no_error_of_it():
    scores, data = scored_batch()
    data["score_mask"][:, 1] = 0
    data["score_counts"][:, 1] = 0
    loss, metrics = RegressionLossFn(WEIGHTS)(scores, data=data, global_valid_seqs=5)
    assert float(metrics["mse_verbosity"]) == 0 and math.isfinite(loss.item())


def step_batch():
    """Make four rows of seven tokens with one to three steps, of which one row does not count."""
    generator = torch.Generator().manual_seed(8)
    values = 2 * torch.randn(4, 6, generator=generator, dtype=torch.float64)
    mask, labels = torch.zeros(4, 7, dtype=torch.float64), torch.zeros(4, 7, dtype=torch.float64)
    for row, (places, right) in enumerate([([2, 4, 6], [1, 0, 1]), ([3], [1]), ([2, 5], [0, 0]), ([4, 6], [1, 0])]):
        mask[row, places] = 1
        labels[row, places] = torch.tensor(right, dtype=torch.float64)
    return values, {
        "token_mask": mask,
        "sample_mask": torch.tensor([1.0, 1, 0, 1], dtype=torch.float64),
        "step_labels": labels,
    }


def test_each_step_has_the_cross_entropy_of_its_label():
    """The formula of Math-Shepherd, arXiv 2312.08935, equation 2."""
    values, data = step_batch()
    loss, metrics = StepLossFn()(values, data=data, global_valid_seqs=3, global_valid_toks=6)
    losses, hits, positive = [], 0, 0
    for row in (0, 1, 3):
        for place in data["token_mask"][row].nonzero()[:, 0].tolist():
            score, label = float(values[row, place - 1]), float(data["step_labels"][row, place])
            right = 1 / (1 + math.exp(-score))
            losses.append(-(label * math.log(right) + (1 - label) * math.log(1 - right)))
            hits, positive = hits + ((score > 0) == (label > 0)), positive + (score > 0)
    assert len(losses) == 6
    assert loss.item() == pytest.approx(sum(losses) / 6, rel=1e-12)
    assert float(metrics["accuracy"]) == pytest.approx(hits / 6)
    assert float(metrics["share_predicted_right"]) == pytest.approx(positive / 6)
    assert (float(metrics["num_steps"]), float(metrics["num_valid_samples"])) == (6, 3)


def test_the_loss_of_steps_does_not_depend_on_the_division():
    values, data = step_batch()
    check_invariance(StepLossFn(), values, data)


def test_a_head_of_several_scores_is_a_linear_layer():
    generator = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(5, 8, generator=generator), torch.randn(3, 8, generator=generator)
    bias = torch.randn(3, generator=generator)
    for given in (None, bias):
        linear = torch.nn.functional.linear(hidden.double(), weight.double(), None if given is None else given.double())
        outputs = scalar_outputs(hidden.bfloat16(), weight.bfloat16(), given)
        assert outputs.shape == (5, 3) and outputs.dtype == torch.float32
        torch.testing.assert_close(scalar_outputs(hidden.double(), weight.double(), given), linear)
        one = scalar_outputs(hidden.double(), weight[:1].double(), None if given is None else given[:1])
        torch.testing.assert_close(one, linear[:, 0])
    assert torch.equal(initial_head(8, 5, 1), initial_head(8, 5))
    assert initial_head(8, 5, 3).shape == (3, 8) and torch.equal(initial_head(8, 5, 3), initial_head(8, 5, 3))
