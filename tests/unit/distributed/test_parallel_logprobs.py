"""Chunked log-probabilities against plain float64 log_softmax, and vLLM's filter rules by hand."""

import math

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl.distributed.parallel_logprobs import (
    HeadUpdate,
    LogitTransform,
    SamplingDensity,
    TopK,
    apply_top_k_top_p,
    default_chunk_size,
    fusion,
    logprobs_from_logits,
    token_logprobs,
    topk_logits,
)
from nemo_rl.distributed.parallel_logprobs.chunked import _grad_logits, _statistics
from nemo_rl.utils.errors import ConfigError

N, D, V = 37, 16, 53


def _inputs(dtype: torch.dtype, bias: bool = False):
    gen = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=gen, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=gen, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=gen)
    b = torch.randn(V, generator=gen, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, targets, b if bias else None


def _reference(hidden, weight, bias, targets, temperature):
    logits = hidden @ weight.t()
    if bias is not None:
        logits = logits + bias
    logp = torch.log_softmax(logits / temperature, dim=-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), entropy


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 8, 37, 512])
def test_values_and_gradients_equal_log_softmax(temperature, bias, chunk_size) -> None:
    hidden, weight, targets, b = _inputs(torch.float64, bias)
    leaves = [t for t in (hidden, weight, b) if t is not None]
    coeff_l, coeff_h = torch.linspace(-1, 2, N, dtype=torch.float64), torch.linspace(1, 0, N).double()

    want_l, want_h = _reference(hidden, weight, b, targets, temperature)
    want = torch.autograd.grad((coeff_l * want_l + coeff_h * want_h).sum(), leaves)
    got_l, got_h = token_logprobs(
        hidden,
        weight,
        targets,
        density=SamplingDensity(temperature),
        bias_V=b,
        chunk_size=chunk_size,
    )
    got = torch.autograd.grad((coeff_l * got_l + coeff_h * got_h).sum(), leaves)

    torch.testing.assert_close(got_l, want_l, rtol=0, atol=1e-12)
    torch.testing.assert_close(got_h, want_h, rtol=0, atol=1e-12)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=1e-11)


@pytest.mark.parametrize("cap", [None, 3.0])
def test_an_update_of_the_head_has_values_and_gradients_of_the_merged_head(cap) -> None:
    hidden, weight, targets, bias = _inputs(torch.float64, bias=True)
    gen = torch.Generator().manual_seed(1)
    a, b = (torch.randn(shape, generator=gen, dtype=torch.float64).requires_grad_() for shape in ((4, D), (V, 4)))
    leaves = [hidden, bias, a, b]
    coeff = torch.linspace(-1, 2, N, dtype=torch.float64)
    logits = hidden @ (weight + 0.5 * b @ a).t() + bias
    logits = logits if cap is None else cap * (logits / cap).tanh()
    want_l = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    want = torch.autograd.grad((coeff * want_l).sum(), leaves)
    update = HeadUpdate(0.5 * hidden @ a.t(), b)
    how = {"bias_V": bias, "transform": LogitTransform(cap=cap), "chunk_size": 8}
    got_l, _ = token_logprobs(hidden, weight, targets, update=update, **how)
    got = torch.autograd.grad((coeff * got_l).sum(), leaves)
    torch.testing.assert_close(got_l, want_l)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)
    top, ids = topk_logits(hidden, weight, TopK(5, temperature=1.0), update=update, **how)
    torch.testing.assert_close((top, ids), tuple(logits.log_softmax(-1).topk(5)))


def test_one_chunk_equals_the_plain_expressions_bit_for_bit() -> None:
    """Later versions repeat runs bit for bit: another order of operations would change the run."""
    hidden, weight, targets, b = _inputs(torch.float32, bias=True)
    got = token_logprobs(hidden, weight, targets, density=SamplingDensity(0.7), bias_V=b)
    weights_l, weights_h = torch.linspace(-1, 2, N), torch.linspace(1, 0.1, N)
    grads = torch.autograd.grad((weights_l * got[0]).sum() + (weights_h * got[1]).sum(), [hidden, weight, b])
    with torch.no_grad():
        x = (hidden @ weight.t() + b) / 0.7
        lse = torch.logsumexp(x, -1)
        log_p = x - lse[:, None]
        p = log_p.exp()
        entropy = lse - (p * x).sum(-1)
        grad = p * -weights_l[:, None] - weights_h[:, None] * p * (log_p + entropy[:, None])
        grad = grad.scatter_add(-1, targets[:, None], weights_l[:, None]) / 0.7
        want = [log_p.gather(-1, targets[:, None])[:, 0], entropy, grad @ weight, grad.t() @ hidden, grad.sum(0)]
    for tensor, wanted in zip([*got, *grads], want, strict=True):
        assert torch.equal(tensor, wanted)


def test_float32_is_close_to_float64() -> None:
    hidden, weight, targets, _ = _inputs(torch.float32)
    want, want_entropy = _reference(hidden.double(), weight.double(), None, targets, 1.0)
    got, entropy = token_logprobs(hidden, weight, targets)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=0, atol=1e-5)


def test_bfloat16_weights_reduce_in_float32() -> None:
    hidden, weight, targets, _ = _inputs(torch.bfloat16)
    got, _ = token_logprobs(hidden, weight, targets)
    want, _ = _reference(hidden.double(), weight.double(), None, targets, 1.0)
    assert got.dtype == torch.float32
    # Only the product is rounded to bfloat16 (8 bits); a bfloat16 logsumexp would be off by ~0.1.
    assert (got.double() - want).abs().max() < 2**-8 * (hidden @ weight.t()).abs().max() * 2


def test_an_empty_batch_still_gives_every_parameter_a_gradient() -> None:
    hidden, weight, targets, _ = _inputs(torch.float32)
    got, entropy = token_logprobs(hidden[:0], weight, targets[:0])
    assert got.shape == entropy.shape == (0,)
    got.sum().backward()
    assert hidden.grad is not None and not hidden.grad.any()
    assert weight.grad is not None and not weight.grad.any()


def test_the_full_logits_are_never_held() -> None:
    gen = torch.Generator().manual_seed(0)
    hidden = torch.randn(512, 8, generator=gen, requires_grad=True)
    weight = torch.randn(1000, 8, generator=gen, requires_grad=True)
    targets = torch.randint(0, 1000, (512,), generator=gen)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
        got, _ = token_logprobs(hidden, weight, targets, chunk_size=16)
    assert max(saved) < 512 * 1000 / 10
    got.sum().backward()


class Operations(TorchDispatchMode):
    """Records the names of operations, and how many of them touched all logits of a chunk."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.num_over_logits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.append(func.__name__.partition(".")[0])
        tensors = [t for t in (*args, out) if isinstance(t, torch.Tensor)]
        self.num_over_logits += any(t.numel() >= N * V for t in tensors) and not func.is_view
        return out


def test_the_gradient_takes_few_passes_and_no_synchronization() -> None:
    hidden, weight, targets, _ = _inputs(torch.float32)
    got, entropy = token_logprobs(hidden, weight, targets)
    with Operations() as without:
        got.sum().backward(retain_graph=True)
    assert not {"any", "item", "_local_scalar_dense", "is_nonzero", "div_", "where"} & set(without.names)
    # 3 matrix products; subtract, exp, scale, scatter
    assert without.num_over_logits == 7
    with Operations() as with_entropy:
        (got.sum() + entropy.sum()).backward()
    assert with_entropy.num_over_logits > 7


def test_gradients_flow_through_either_result_alone() -> None:
    hidden, weight, targets, _ = _inputs(torch.float64)
    want = torch.autograd.grad(_reference(hidden, weight, None, targets, 1.0)[1].sum(), [hidden, weight])
    got = torch.autograd.grad(token_logprobs(hidden, weight, targets, chunk_size=8)[1].sum(), [hidden, weight])
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=1e-11)


def test_chunks_are_larger_on_gpus() -> None:
    with FakeTensorMode():
        sizes = [default_chunk_size(on_gpu=on_gpu) for on_gpu in (False, True)]
    assert sizes == [512, 2048]


def test_statistics_compile_without_breaks_for_any_number_of_tokens() -> None:
    """The compiler's front end needs no GPU: one graph, the same numbers, dropped tokens included."""
    frames: list[int] = []

    def backend(graph, inputs):
        frames.append(len(graph.graph.nodes))
        return graph.forward

    statistics, grad_logits = (
        torch.compile(function, backend=backend, fullgraph=True) for function in (_statistics, _grad_logits)
    )
    for n in (32, 17, 9, 21):
        x = torch.randn(n, V).masked_fill(torch.rand(n, V) < 0.3, -math.inf)
        targets = x.argmax(-1, keepdim=True)
        want_terms = _statistics(x, targets)
        for got, want in zip(statistics(x, targets), want_terms, strict=True):
            assert torch.equal(got, want)
        given = (x, want_terms[1], torch.rand(n, 1), torch.rand(n), torch.rand(n))
        assert torch.equal(grad_logits(*given), _grad_logits(*given))
    assert len(frames) == 4, "one graph for the first number of tokens, one for all others"


def test_a_gpu_runs_compiled_functions_unless_they_do_not_compile(monkeypatch, caplog) -> None:
    def plain(x):
        return "plain"

    with FakeTensorMode():
        cpu, gpu = (torch.empty(1, device=device) for device in ("cpu", "cuda"))
    monkeypatch.setattr(fusion, "has_triton", lambda: False)
    assert fusion.fused_on_gpu(plain, gpu) is plain
    monkeypatch.setattr(fusion, "has_triton", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda function: lambda x: "compiled")
    assert fusion.fused_on_gpu(plain, cpu) is plain
    assert fusion.fused_on_gpu(plain, gpu)(gpu) == "compiled"

    def refused(x):
        return "plain"

    def fail(x):
        raise BackendCompilerFailed(plain, RuntimeError("no C compiler"), None)

    monkeypatch.setattr(torch, "compile", lambda function: fail)
    call = fusion.fused_on_gpu(refused, gpu)
    assert [call(gpu), call(gpu)] == ["plain", "plain"]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "refused is not compiled for this GPU, so it is slower"
    ]


def _vllm_filter(row: list[float], top_k: int | None, top_p: float) -> set[int]:
    """Return the kept token ids by the definition, in plain Python."""
    kept = set(range(len(row)))
    if top_k is not None:
        kth = sorted(row, reverse=True)[min(top_k, len(row)) - 1]
        kept = {i for i in kept if row[i] >= kth}
    total = sum(math.exp(row[i]) for i in kept)
    ascending = sorted(kept, key=lambda i: row[i])
    mass, dropped = 0.0, set()
    for i in ascending[:-1]:
        mass += math.exp(row[i]) / total
        if mass <= 1 - top_p:
            dropped.add(i)
    return kept - dropped


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (None, 0.6), (7, 0.5), (1, 1.0), (None, 0.01)])
def test_the_filter_keeps_the_tokens_that_the_sampler_keeps(top_k, top_p) -> None:
    logits = torch.randn(20, V, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    filtered, keep = apply_top_k_top_p(logits, top_k, top_p)
    assert keep is not None
    for row, kept_row, out in zip(logits, keep, filtered, strict=True):
        assert set(kept_row.nonzero().flatten().tolist()) == _vllm_filter(row.tolist(), top_k, top_p)
        assert torch.equal(out.isfinite(), kept_row)


def test_filtered_logprobs_and_gradients_equal_the_definition() -> None:
    hidden, weight, targets, _ = _inputs(torch.float64)
    density = SamplingDensity(temperature=0.8, top_k=9, top_p=0.9)
    logits = (hidden @ weight.t()) / 0.8
    _, keep = apply_top_k_top_p(logits.detach(), 9, 0.9)
    keep = keep.scatter(-1, targets[:, None], True)
    logp = torch.log_softmax(logits.masked_fill(~keep, -math.inf), dim=-1)
    want = logp.gather(-1, targets[:, None]).squeeze(-1)
    want_grads = torch.autograd.grad(want.sum(), [hidden, weight])

    got, entropy = token_logprobs(hidden, weight, targets, density=density, chunk_size=10)
    got_grads = torch.autograd.grad(got.sum(), [hidden, weight])
    direct, direct_entropy = logprobs_from_logits(hidden @ weight.t(), targets, density=density)

    assert got.isfinite().all() and entropy.isfinite().all()
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(direct, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(direct_entropy, entropy, rtol=0, atol=1e-12)
    for g, w in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=1e-11)


def test_a_sampled_token_outside_the_filter_stays_in_the_distribution() -> None:
    """Top-1 of (0.5, 0.3, 0.2) keeps the first; the sampled last one is 0.2 of the 0.7 that both have."""
    logits = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log().requires_grad_(True)
    logprobs, _ = logprobs_from_logits(logits, torch.tensor([2]), density=SamplingDensity(top_k=1))
    assert logprobs.exp().item() == pytest.approx(0.2 / 0.7, rel=1e-12)
    logprobs.sum().backward()
    assert logits.grad.tolist()[0] == pytest.approx([-0.5 / 0.7, 0.0, 1 - 0.2 / 0.7], rel=1e-12)


@pytest.mark.parametrize("bad", [{"temperature": 0.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_invalid_sampling_densities_are_refused(bad) -> None:
    with pytest.raises(ConfigError):
        SamplingDensity(**bad)
