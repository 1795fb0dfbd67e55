"""The loss of a critic: values by hand, finite differences, and independence of how a batch is cut."""

import pytest
import torch
from torch import Tensor

from nemo_rl.losses.invariance import check_invariance
from nemo_rl.losses.loss_function import LossInputType
from nemo_rl.losses.supervised import MseValueLossFn
from nemo_rl.utils.errors import ConfigError


def rows(num_rows: int = 6, num_tokens: int = 8) -> tuple[Tensor, dict[str, Tensor]]:
    """Values `[B, T-1]` and a batch, in float64; some old values are near the new ones, others far away."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    token_mask = (torch.rand(num_rows, num_tokens, generator=generator) < 0.7).double()
    sample_mask = torch.ones(num_rows).double()
    sample_mask[1] = 0
    old = normal(num_rows, num_tokens)
    values = old[:, 1:] + 0.3 * normal(num_rows, num_tokens - 1)
    data = {
        "values": old,
        "returns": old + 0.5 * normal(num_rows, num_tokens),
        "token_mask": token_mask,
        "sample_mask": sample_mask,
    }
    return values, data


def by_definition(
    values: Tensor, data: dict[str, Tensor], scale: float, cliprange: float | None
) -> tuple[float, float]:
    """Loss and share of clipped tokens, token by token in plain Python."""
    total, clipped, count = 0.0, 0, 0
    for row in range(len(values)):
        for column in range(values.shape[1]):
            if not (data["token_mask"][row, column + 1] and data["sample_mask"][row]):
                continue
            value, old = float(values[row, column]), float(data["values"][row, column + 1])
            target = float(data["returns"][row, column + 1])
            squares = [(value - target) ** 2]
            if cliprange is not None:
                squares.append((min(max(value, old - cliprange), old + cliprange) - target) ** 2)
            total, count = total + scale * 0.5 * max(squares), count + 1
            clipped += max(squares) > squares[0]
    return total / count, clipped / count


def counts(data: dict[str, Tensor]) -> dict[str, Tensor]:
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    return {"global_valid_seqs": data["sample_mask"].sum(), "global_valid_toks": mask.sum()}


@pytest.mark.parametrize("cliprange", [None, 0.2, 0.01])
@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_loss_and_gradient_equal_the_definition(scale: float, cliprange: float | None) -> None:
    values, data = rows()
    loss_fn = MseValueLossFn({"scale": scale, "cliprange": cliprange})
    values.requires_grad_(True)
    loss, metrics = loss_fn(values, data, **counts(data))
    loss.backward()
    want, share = by_definition(values.detach(), data, scale, cliprange)
    assert float(loss.detach()) == pytest.approx(want, rel=1e-12)
    assert float(metrics["vf_clipfrac"]) == pytest.approx(share)
    assert (share > 0) == (cliprange is not None)
    assert values.grad is not None
    for row, column in ((0, 0), (0, 3), (1, 2), (2, 5), (4, 6), (5, 1)):
        changed = []
        for step in (1e-6, -1e-6):
            other = values.detach().clone()
            other[row, column] += step
            changed.append(by_definition(other, data, scale, cliprange)[0])
        assert float(values.grad[row, column]) == pytest.approx((changed[0] - changed[1]) / 2e-6, abs=1e-7)


def test_a_value_that_moved_too_far_towards_its_return_has_no_gradient() -> None:
    """The return is 1; the first value moved from 0 to 0.5 with a limit of 0.2, the second away from it."""
    data = {
        "values": torch.zeros(1, 3),
        "returns": torch.tensor([[0.0, 1.0, 1.0]]),
        "token_mask": torch.tensor([[0.0, 1.0, 1.0]]),
        "sample_mask": torch.ones(1),
    }
    values = torch.tensor([[0.5, -0.5]], requires_grad=True)
    loss, metrics = MseValueLossFn({"cliprange": 0.2})(values, data, **counts(data))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.5 * (0.8**2 + 1.5**2) / 2)
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([[0.0, -0.75]]))
    assert float(metrics["vf_clipfrac"]) == 0.5


def test_values_within_the_limit_are_not_counted_as_limited() -> None:
    """In float32, `old + (value - old)` differs from many values by their last digits."""
    random = torch.Generator().manual_seed(5)
    old, values = (0.03 * torch.randn(1, 2000, generator=random) for _ in range(2))
    assert (old + (values - old) != values).any()
    data = {"values": old, "returns": torch.ones(1, 2000), "token_mask": torch.ones(1, 2000)}
    data["sample_mask"] = torch.ones(1)
    _, metrics = MseValueLossFn({"cliprange": 0.5})(values[:, 1:], data, **counts(data))
    assert float(metrics["vf_clipfrac"]) == 0.0


@pytest.mark.parametrize("cliprange", [None, 0.2])
def test_the_loss_does_not_depend_on_how_a_batch_is_cut(cliprange: float | None) -> None:
    values, data = rows()
    check_invariance(MseValueLossFn({"cliprange": cliprange}), values, data)


def test_what_the_loss_asks_for() -> None:
    assert MseValueLossFn.input_type is LossInputType.VALUE
    for wrong in ({"scale": 0.0}, {"cliprange": -0.1}, {"clip_range": 0.2}):
        with pytest.raises(ConfigError):
            MseValueLossFn(wrong)


def test_a_batch_without_a_counted_token_has_a_loss_of_zero() -> None:
    values, data = rows()
    data["sample_mask"] = torch.zeros(6).double()
    data["returns"] = data["returns"] * torch.nan
    values.requires_grad_(True)
    loss, _ = MseValueLossFn({})(values, data, **counts(data))
    loss.backward()
    assert float(loss.detach()) == 0.0 and values.grad is not None and not values.grad.any()
