"""Flash attention over the pieces of a plan against its definition in float64: outputs and gradients."""

import pytest
import torch
from torch import Tensor

from nemo_rl.models.attention import flash_attn
from nemo_rl.models.attention.kernels import attend
from nemo_rl.models.attention.plan import AttentionPlan, Piece, Scoring

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLANS = {
    "row": [Piece(0, 300, 0, 300)],
    "segments": [Piece(0, 37, 0, 37), Piece(37, 38, 37, 38), Piece(38, 300, 38, 300)],
    "chunks of a longer row": [Piece(0, 40, 60, 100), Piece(40, 150, 100, 210), Piece(150, 300, 100, 600)],
}


def _with_gradients(leaves: list[Tensor], plan: AttentionPlan, scoring: Scoring) -> list[Tensor]:
    query, key, value, sinks = leaves
    scoring = Scoring(scoring.scaling, scoring.window, scoring.softcap, sinks if scoring.sinks is not None else None)
    out = attend(query, key, value, plan, scoring)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    grads = torch.autograd.grad((out * weight.to(out)).sum(), leaves, allow_unused=True)
    return [t.detach().double().cpu() for t in (out, *grads) if t is not None]


@pytest.mark.parametrize("pieces", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("value_dim", [64, 48])
@pytest.mark.parametrize(
    "scoring", [Scoring(), Scoring(0.2, 16), Scoring(sinks=torch.ones(1)), Scoring(0.2, 16, None, torch.ones(1))]
)
def test_flash_attention_equals_the_definition(pieces, rows, value_dim, scoring) -> None:
    gen = torch.Generator().manual_seed(0)
    keys = max(piece.key_stop for piece in pieces)
    shapes = [(rows, 8, 300, 64), (rows, 2, keys, 64), (rows, 2, keys, value_dim), (8,)]
    half = [torch.randn(shape, generator=gen).bfloat16() for shape in shapes]
    want = _with_gradients([t.double().requires_grad_() for t in half], AttentionPlan(pieces), scoring)
    leaves = [t.to("cuda").requires_grad_() for t in half]
    assert flash_attn.find_kernel(*leaves[:3], scoring) is flash_attn.torch_varlen
    for got, expected in zip(_with_gradients(leaves, AttentionPlan(pieces), scoring), want, strict=True):
        assert (got - expected).abs().max() <= 0.03 * expected.abs().max()
