"""Differences of the proof of a mesh, relative to the largest number of the reference."""

import math

import pytest
import torch

from nemo_rl.models.dtensor.proof.numbers import _relative

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("got", "want", "scale", "difference"),
    [
        ([1.0, 2.5], [1.0, 2.0], 2.0, 0.25),
        ([0.0, 0.0], [0.0, 0.0], 0.0, 0.0),
        ([0.0, 1e-9], [0.0, 0.0], 0.0, math.inf),
        ([0.0, 0.1], [0.0, 0.0], 100.0, 1.0),
        ([0.0, math.nan], [0.0, 1.0], 1.0, math.inf),
        ([], [], 0.0, 0.0),
    ],
)
def test_a_difference_is_relative_to_the_largest_number(
    got: list[float], want: list[float], scale: float, difference: float
) -> None:
    tensors = (torch.tensor(values, dtype=torch.float64) for values in (got, want))
    assert _relative(*tensors, scale) == pytest.approx(difference)
