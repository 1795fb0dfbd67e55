"""The calls of flash kernels and their arguments; the kernels themselves run in `tests/gpu`."""

import math

import pytest
import torch
import torch.nn.attention.varlen as varlen_of_torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nemo_rl.models.attention import flash_attn
from nemo_rl.models.attention.flash_attn import flash_attention, use_flash_attention
from nemo_rl.models.attention.kernels import attend
from nemo_rl.models.attention.plan import AttentionPlan, Piece, Scoring, plan_of_row
from nemo_rl.models.attention.registered import varlen_attention
from nemo_rl.utils.errors import ConfigError

pytestmark = pytest.mark.fast

BOUNDS = torch.tensor([0, 5, 7, 16], dtype=torch.int32)
LATE_CHUNK = [Piece(0, 2, 0, 2), Piece(2, 4, 4, 6), Piece(4, 9, 4, 15)]
"""A context-parallel rank's plan: the last two pieces are chunks of one sequence, whose keys overlap."""


def _scores(query, key, bounds, scale, window) -> list[tuple[slice, slice, Tensor]]:
    """Return queries, keys and masked float64 scores `[H, q, k]` of each piece, aligned at the bottom right."""
    scored = []
    edges_q, edges_k = bounds[0].tolist(), bounds[1].tolist()
    assert max(b - a for a, b in zip(edges_q, edges_q[1:], strict=False)) == bounds[2]
    assert max(b - a for a, b in zip(edges_k, edges_k[1:], strict=False)) == bounds[3]
    assert window[1] == 0 and edges_q[-1] == len(query) and edges_k[-1] == len(key)
    for i in range(len(edges_q) - 1):
        rows, columns = slice(edges_q[i], edges_q[i + 1]), slice(edges_k[i], edges_k[i + 1])
        q, k = query[rows].transpose(0, 1).double(), key[columns].transpose(0, 1).double()
        last = k.shape[1] - q.shape[1] + torch.arange(q.shape[1])
        distance = last[:, None] - torch.arange(k.shape[1])
        seen = (distance >= 0) & ((distance <= window[0]) if window[0] >= 0 else True)
        k = k.repeat_interleave(len(q) // len(k), dim=0)
        scores = q @ k.transpose(1, 2) * (scale or q.shape[-1] ** -0.5)
        scored.append((rows, columns, scores.masked_fill(~seen, -math.inf)))
    return scored


def reference(query, key, value, bounds, scale, window, softcap=None) -> tuple[Tensor, Tensor]:
    """Compute the kernels' results in plain float64: output `[T, H, D]` and log-sum-exp `[H, T]`."""
    outs, sums = [], []
    for _, columns, scores in _scores(query, key, bounds, scale, window):
        if softcap is not None:
            scores = torch.where(scores.isinf(), scores, torch.tanh(scores / softcap) * softcap)
        v = value[columns].transpose(0, 1).double().repeat_interleave(query.shape[1] // value.shape[1], dim=0)
        outs.append((scores.softmax(-1) @ v).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs).to(query.dtype), torch.cat(sums, dim=1).float()


def of_torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    return reference(query, key, value, (cu_seq_q, cu_seq_k, max_q, max_k), scale, window_size)[0]


def of_torch_2_13(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
):
    assert enable_gqa or query.size(1) == key.size(1), "what torch 2.13 refuses"
    out, lse = reference(query, key, value, (cu_seq_q, cu_seq_k, max_q, max_k), scale, window_size)
    return (out, lse) if return_aux is not None and return_aux.lse else out


def backward_of_torch(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    """Flash attention's backward pass (arXiv:2307.08691, algorithm 2), from the given output and log-sum-exp."""
    assert dropout_p == 0.0 and is_causal == (window_size_left == -1)
    grads = [torch.zeros(t.shape, dtype=torch.float64) for t in (query, key, value)]
    group, factor = query.shape[1] // key.shape[1], scale or query.shape[-1] ** -0.5
    window = (window_size_left, window_size_right)
    for rows, columns, scores in _scores(query, key, (cum_seq_q, cum_seq_k, max_q, max_k), scale, window):
        grad, o, q = (t[rows].transpose(0, 1).double() for t in (grad_out, out, query))
        k, v = (t[columns].transpose(0, 1).double().repeat_interleave(group, dim=0) for t in (key, value))
        weights = (scores - logsumexp[:, rows, None].double()).exp()
        grad_scores = weights * (grad @ v.transpose(1, 2) - (grad * o).sum(-1, keepdim=True)) * factor
        grads[0][rows] += (grad_scores @ k).transpose(0, 1)
        for index, of_heads in ((1, grad_scores.transpose(1, 2) @ q), (2, weights.transpose(1, 2) @ grad)):
            grads[index][columns] += of_heads.unflatten(0, (-1, group)).sum(1).transpose(0, 1)
    return tuple(grad.to(query.dtype) for grad in grads)


def of_the_package(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
):
    assert causal and dropout_p == 0.0
    bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return reference(q, k, v, bounds, softmax_scale, window_size, softcap or None)[0]


def _random(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.fixture
def kernel(monkeypatch):
    """Make `attend` use a flash kernel on the CPU."""

    def take(stand_in) -> None:
        monkeypatch.setattr(flash_attn, "_can_run", lambda *_: True)
        if stand_in is of_the_package:
            monkeypatch.setattr(flash_attn, "flash_attn_varlen", lambda: of_the_package)
        else:
            monkeypatch.setattr(varlen_of_torch, "varlen_attn", stand_in)

    return take


@pytest.mark.parametrize("stand_in", [of_torch_2_11, of_torch_2_13])
@pytest.mark.parametrize(("key_heads", "window"), [(2, None), (4, None), (1, 3)])
def test_the_kernel_is_called_with_the_signature_of_each_torch_version(stand_in, key_heads, window, kernel) -> None:
    query, key, value = _random((1, 4, 16, 8), (1, key_heads, 16, 8), (1, key_heads, 16, 8))
    mask = None if window is None else torch.tensor(window)
    want, _ = varlen_attention(nn.Identity(), query, key, value, mask, cu_seq_lens_q=BOUNDS)
    kernel(stand_in)
    got, _ = varlen_attention(nn.Identity(), query, key, value, mask, cu_seq_lens_q=BOUNDS, max_length_q=9)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("value_dim", [8, 5])
def test_pieces_with_more_keys_than_queries_and_short_values_are_exact(window, rows, value_dim, kernel) -> None:
    """Context parallelism and MLA need these; with a window the kernel gets no key that no query sees."""
    query, key, value = _random((rows, 4, 9, 8), (rows, 2, 15, 8), (rows, 2, 15, value_dim))
    plan, scoring = AttentionPlan(LATE_CHUNK), Scoring(0.3, window)
    want = attend(query, key, value, plan, scoring)
    kernel(of_torch_2_13)
    torch.testing.assert_close(attend(query, key, value, plan, scoring), want, rtol=0, atol=1e-6)
    keys = [p.keys for p in plan.within(window).pieces]
    assert keys == ([2, 2, 11] if window is None else [2, 2, 7])


@pytest.mark.parametrize("window", [None, 3])
def test_sinks_with_the_kernel_of_torch_have_exact_gradients(window, kernel, monkeypatch) -> None:
    leaves = [t.requires_grad_() for t in _random((1, 4, 9, 8), (1, 2, 15, 8), (1, 2, 15, 5), (4,))]
    (weight,) = _random((1, 4, 9, 5))

    def outputs() -> list[Tensor]:
        query, key, value, sinks = leaves
        out = attend(query, key, value, AttentionPlan(LATE_CHUNK), Scoring(0.3, window, sinks=sinks))
        return [out, *torch.autograd.grad((out * weight).sum(), leaves)]

    want = outputs()
    kernel(of_torch_2_13)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward_of_torch)
    for got, expected in zip(outputs(), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)


def test_the_backward_kernel_accepts_the_arguments_passed() -> None:
    names = [argument.name for argument in torch.ops.aten._flash_attention_backward.default._schema.arguments]
    code = backward_of_torch.__code__
    assert names == list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def test_the_flash_attn_package_caps_scores(kernel) -> None:
    query, key, value = _random((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8))
    plan, scoring = plan_of_row(9), Scoring(2.0, 4, softcap=1.5)
    want = attend(query, key, value, plan, scoring)
    assert not torch.allclose(want, attend(query, key, value, plan, Scoring(2.0, 4)), atol=1e-2)
    kernel(of_the_package)
    assert flash_attn.find_kernel(query, key, value, scoring) is not None
    torch.testing.assert_close(attend(query, key, value, plan, scoring), want, rtol=0, atol=1e-6)


def without_softcap(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0):
    raise AssertionError("not called")


@pytest.mark.parametrize(
    ("scoring", "package", "found"),
    [
        (Scoring(), of_the_package, "torch"),
        (Scoring(window=3, sinks=torch.zeros(2)), of_the_package, "torch"),
        (Scoring(softcap=5.0), of_the_package, "package"),
        (Scoring(dropout=0.1), of_the_package, "package"),
        (Scoring(softcap=5.0), without_softcap, None),
        (Scoring(softcap=5.0), None, None),
        (Scoring(softcap=5.0, sinks=torch.zeros(2)), of_the_package, None),
    ],
)
def test_the_first_kernel_that_supports_the_call_is_chosen(scoring, package, found, monkeypatch) -> None:
    monkeypatch.setattr(flash_attn, "_can_run", lambda *_: True)
    monkeypatch.setattr(flash_attn, "flash_attn_varlen", lambda: package)
    kernel = flash_attn.find_kernel(*_random((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)), scoring)
    assert {None: None, flash_attn.torch_varlen: "torch"}.get(kernel, "package") == found


@pytest.mark.parametrize(
    ("changes", "runs"),
    [
        ({}, True),
        ({"capability": (7, 5)}, False),
        ({"capability": (12, 0)}, True),
        ({"head_dim": 20}, False),
        ({"head_dim": 256}, True),
        ({"head_dim": 264}, False),
        ({"value_dim": 32}, True),
        ({"value_dim": 128}, False),
        ({"dtype": torch.float32}, False),
        ({"device": "cpu"}, False),
    ],
)
def test_kernels_get_only_the_arguments_they_accept(changes, runs, monkeypatch) -> None:
    case = {"capability": (8, 0), "head_dim": 64, "dtype": torch.bfloat16, "device": "cuda"} | changes
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: case["capability"])
    with FakeTensorMode():
        tensor, value = (
            torch.empty(1, 2, 16, dim, dtype=case["dtype"], device=case["device"])
            for dim in (case["head_dim"], case.get("value_dim", case["head_dim"]))
        )
    assert (flash_attn.find_kernel(tensor, tensor, value, Scoring()) is not None) is runs


@pytest.mark.parametrize(
    ("device", "capability", "package", "reason"),
    [
        ("cpu", None, True, "it runs on GPUs only"),
        ("cuda", (10, 0), True, "it needs a GPU of compute capability 9.x .Hopper., and this one has 10.0"),
        ("cuda", (9, 0), False, "the package flash_attn_interface .flash-attn-3. is not installed"),
    ],
)
def test_version_3_is_refused_where_it_cannot_run(monkeypatch, device, capability, package, reason) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(flash_attn.importlib.util, "find_spec", lambda name: package or None)
    with pytest.raises(ConfigError, match=f"flash_attention_version=3 cannot be used: {reason}"):
        use_flash_attention(3, torch.device(device))
    use_flash_attention(2, torch.device(device))


def test_version_3_replaces_the_kernel_of_torch_in_a_block(monkeypatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(flash_attn.importlib.util, "find_spec", lambda name: name == "flash_attn_interface" or None)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", calls.append)
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", lambda: calls.append("restored"))
    with flash_attention(2, torch.device("cuda")):
        assert calls == []
    with flash_attention(3, torch.device("cuda")):
        assert calls == ["FA3"]
    assert calls == ["FA3", "restored"]
