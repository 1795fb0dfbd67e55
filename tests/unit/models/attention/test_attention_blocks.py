"""Attention in blocks equals attention by its definition, and a query's bits depend on nothing but its keys."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nemo_rl.models.attention.blocks import attend_in_blocks
from nemo_rl.models.attention.plan import AttentionPlan, Piece, Scoring, plan_of_row
from nemo_rl.utils.errors import ConfigError

LENGTH = 200
SCORINGS = {
    "plain": Scoring(),
    "window": Scoring(window=37),
    "cap": Scoring(softcap=5.0),
    "sinks": Scoring(sinks=torch.linspace(-1.0, 1.0, 6)),
    "all": Scoring(scaling=0.3, window=70, softcap=20.0, sinks=torch.linspace(-1.0, 1.0, 6)),
}
BOUNDS = [0, 13, 77, 78, LENGTH]


def inputs(rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value of 6 query heads and 2 key heads."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, 6, LENGTH, 16), (rows, 2, LENGTH, 16), (rows, 2, LENGTH, 24))
    query, key, value = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    return query, key, value


def by_definition(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Return attention in float64, with all scores in memory."""
    query, key, value = query.double(), *(each.double().repeat_interleave(3, 1) for each in (key, value))
    scores = query @ key.transpose(-1, -2) * (scoring.scaling or query.shape[-1] ** -0.5)
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    seen = (distance >= 0) & (distance < (scoring.window or LENGTH))
    weights = scores.masked_fill(~seen, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if scoring.sinks is not None:
        total = total + scoring.sinks.double().exp()[:, None, None]
    return weights / total @ value


@pytest.mark.parametrize("name", SCORINGS)
def test_outputs_and_gradients_are_those_of_the_definition(name: str) -> None:
    query, key, value = inputs()
    ours = attend_in_blocks(query, key, value, plan_of_row(LENGTH), SCORINGS[name])
    exact = by_definition(query, key, value, SCORINGS[name])
    assert (ours - exact).abs().max() < 5e-6
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(ours, (query, key, value), weights)
    for own, other in zip(gradients, torch.autograd.grad(exact, (query, key, value), weights.double()), strict=True):
        assert (own - other).abs().max() < 2e-5


def test_gradients_of_sinks() -> None:
    query, key, value = inputs()
    ours, exact = (torch.linspace(-1.0, 1.0, 6).requires_grad_() for _ in range(2))
    attend_in_blocks(query, key, value, plan_of_row(LENGTH), Scoring(sinks=ours)).square().sum().backward()
    by_definition(query, key, value, Scoring(sinks=exact)).square().sum().backward()
    assert ours.grad is not None and torch.allclose(ours.grad, exact.grad, rtol=1e-4)  # type: ignore[arg-type]


def test_dropped_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"attention_dropout=0"):
        attend_in_blocks(*inputs(), plan_of_row(LENGTH), Scoring(dropout=0.1))


def count_other_bits(scoring: Scoring) -> int:
    """Return how many entries of outputs have other bits alone, in a packed row, or one query at a time."""
    query, key, value = (each.detach() for each in inputs(1))
    whole = attend_in_blocks(query, key, value, plan_of_row(LENGTH), scoring)
    plan = AttentionPlan([Piece(start, stop, start, stop) for start, stop in pairwise(BOUNDS)])
    packed = attend_in_blocks(query, key, value, plan, scoring)
    found = 0
    for start, stop in pairwise(BOUNDS):
        cut = [each[:, :, start:stop] for each in (query, key, value)]
        found += int((attend_in_blocks(*cut, plan_of_row(stop - start), scoring) != packed[:, :, start:stop]).sum())
    for place in (0, 5, 63, 64, 65, 127, 199):
        cut = [query[:, :, place : place + 1], *(each[:, :, : place + 1] for each in (key, value))]
        one = attend_in_blocks(*cut, AttentionPlan([Piece(0, 1, 0, place + 1)]), scoring)
        found += int((one != whole[:, :, place : place + 1]).sum())
    return found


def test_bits_do_not_depend_on_other_queries() -> None:
    """Matrix products of a process can be replaced only once, so another process does it."""
    source = (
        f"import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_attention_blocks import SCORINGS, count_other_bits\n"
        "from nemo_rl.host.row_invariance import compute_rows_alike\n"
        "before = count_other_bits(SCORINGS['plain'])\n"
        "compute_rows_alike()\n"
        "print(json.dumps([before, *map(count_other_bits, SCORINGS.values())]))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=True)
    before, *after = json.loads(done.stdout)
    assert before > 0 and after == [0] * len(SCORINGS)
