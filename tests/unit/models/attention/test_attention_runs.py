"""Packed segments of one length go through one call of the kernel with the same results."""

from itertools import accumulate, pairwise
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from nemo_rl.models.attention import AttentionPlan, Piece, Scoring, attend

pytestmark = pytest.mark.fast

LENGTHS = [9, 9, 9, 7, 7, 33, 1, 1, 9]


def tensors(rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    # A layer passes tokens before heads.
    shapes = [(rows, sum(LENGTHS), heads, 16) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def plan_of(lengths: list[int]) -> AttentionPlan:
    return AttentionPlan([Piece(a, b, a, b) for a, b in pairwise(accumulate(lengths, initial=0))])


def outputs(qkv: list[torch.Tensor], plan: AttentionPlan, scoring: Scoring) -> list[torch.Tensor]:
    out = attend(*qkv, plan, scoring)
    weights = torch.arange(out.numel(), dtype=out.dtype).view_as(out) / out.numel()
    return [out, *torch.autograd.grad((out * weights).sum(), qkv)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("scoring", [Scoring(), Scoring(window=8), Scoring(scaling=0.3, window=100)])
def test_runs_equal_single_segments_bit_for_bit_in_fewer_calls(scoring, rows, dtype) -> None:
    qkv, plan = tensors(rows, dtype), plan_of(LENGTHS)
    with mock.patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as kernel:
        found = outputs(qkv, plan, scoring)
        assert kernel.call_count == len([9, 7, 33, 1, 9])
    with mock.patch.object(AttentionPlan, "runs", lambda self, keys: None):
        one_by_one = outputs(qkv, plan, scoring)
    assert all(torch.equal(a, b) for a, b in zip(found, one_by_one, strict=True))


def test_a_segment_attends_only_to_itself() -> None:
    qkv, plan = tensors(1, torch.float64), plan_of(LENGTHS)
    found = attend(*qkv, plan, Scoring())
    for start, stop in pairwise(accumulate(LENGTHS, initial=0)):
        query, key, value = (tensor[:, :, start:stop] for tensor in qkv)
        scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) / 4
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
        want = scores.softmax(-1) @ value.repeat_interleave(2, 1)
        torch.testing.assert_close(found[:, :, start:stop], want)


@pytest.mark.parametrize(
    ("pieces", "keys"),
    [
        ([Piece(0, 4, 0, 4), Piece(4, 8, 0, 8)], 8),
        ([Piece(0, 4, 4, 8), Piece(4, 8, 0, 4)], 8),
        ([Piece(0, 4, 0, 4)], 8),
        ([Piece(0, 4, 2, 8)], 8),
    ],
)
def test_pieces_that_do_not_divide_the_keys_have_no_runs(pieces, keys) -> None:
    assert AttentionPlan(pieces).runs(keys) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_with_more_keys_than_queries_equal_single_pieces_up_to_rounding(dtype) -> None:
    sizes = [(5, 5), (3, 8), (3, 8), (3, 9)]
    edges = [list(pairwise(accumulate(lengths, initial=0))) for lengths in zip(*sizes, strict=True)]
    plan = AttentionPlan([Piece(*queries, *keys) for queries, keys in zip(*edges, strict=True)])
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, 14, 16), (1, 2, 30, 16), (1, 2, 30, 16)]
    qkv = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    found = outputs(qkv, plan, Scoring())
    with mock.patch.object(AttentionPlan, "runs", lambda self, keys: None):
        one_by_one = outputs(qkv, plan, Scoring())
    for a, b in zip(found, one_by_one, strict=True):
        torch.testing.assert_close(a, b)
