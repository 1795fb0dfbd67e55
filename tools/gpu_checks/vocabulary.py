"""Compare the chunked log-probabilities over the vocabulary with a plain log-softmax in float64."""

from collections.abc import Iterator

import torch
from torch import Tensor

from gpu_checks.bench import Bench
from gpu_checks.report import Figures, Finding
from nemo_rl.distributed.parallel_logprobs import SamplingDensity, token_logprobs
from nemo_rl.distributed.parallel_logprobs.head import OutputHead

NUM_TOKENS, VOCAB_SIZE, WIDTH, CHUNK = 1300, 151936, 512, 512
CPU_NUM_TOKENS, CPU_VOCAB_SIZE, CPU_WIDTH, CPU_CHUNK = 50, 1000, 64, 16
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Largest allowed error, relative to the largest value."""
TEMPERATURE = 0.7


def statistics(bench: Bench) -> Iterator[Finding]:
    """Check log-probabilities, entropies and gradients, with a real vocabulary on GPUs; the last chunk is not full."""
    for dtype, allowed in TOLERANCE.items():
        hidden_ND, weight_VD, targets_N = _random_head(bench, dtype)
        want = _with_gradients(_plain(hidden_ND, weight_VD, targets_N), hidden_ND, weight_VD)
        chunk = CHUNK if bench.on_gpu else CPU_CHUNK
        density = SamplingDensity(TEMPERATURE)
        scored = token_logprobs(hidden_ND, weight_VD, targets_N, density=density, chunk_size=chunk)
        got = _with_gradients(scored, hidden_ND, weight_VD)
        names = ("logprobs", "entropy", "grad_hidden", "grad_weight")
        errors = {
            name: float((g.double() - w).abs().max() / w.abs().max())
            for name, g, w in zip(names, got, want, strict=True)
        }
        problem = "" if max(errors.values()) <= allowed else "differs from a plain log-softmax"
        yield Finding(str(dtype).removeprefix("torch."), {**errors, "allowed": allowed}, problem)
    yield _of_rounded_logits(bench)


@torch.no_grad()
def _of_rounded_logits(bench: Bench) -> Finding:
    """Measure what log-probs lose by logits in bfloat16, which vLLM has without `head_dtype`, and ours do not have."""
    hidden_ND, weight_VD, targets_N = _random_head(bench, torch.bfloat16)
    want_N = _plain(hidden_ND, weight_VD, targets_N)[0]
    logits = {"float32": OutputHead(weight_VD).logits(hidden_ND), "bfloat16": (hidden_ND @ weight_VD.t()).float()}
    errors = {name: float((_chosen(logits_NV, targets_N) - want_N).abs().mean()) for name, logits_NV in logits.items()}
    figures: Figures = {f"{name}_logits": error for name, error in errors.items()}
    exact = not bench.on_gpu or errors["float32"] < errors["bfloat16"]  # CPUs round the product in both cases
    return Finding("mean error by precision of logits", figures, "" if exact else "float32 logits are not closer")


def _chosen(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    return (logits_NV.double() / TEMPERATURE).log_softmax(-1).gather(-1, targets_N[:, None])[:, 0]


def _random_head(bench: Bench, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return random hidden states, output head and targets; the logits are a few units large."""
    sizes = (NUM_TOKENS, VOCAB_SIZE, WIDTH) if bench.on_gpu else (CPU_NUM_TOKENS, CPU_VOCAB_SIZE, CPU_WIDTH)
    num_tokens, vocab_size, width = sizes
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(num_tokens, width, generator=generator)
    weight = torch.randn(vocab_size, width, generator=generator) * 2 * width**-0.5
    targets = torch.randint(vocab_size, (num_tokens,), generator=generator)
    leaves = [tensor.to(bench.device, dtype).requires_grad_() for tensor in (hidden, weight)]
    return leaves[0], leaves[1], targets.to(bench.device)


def _plain(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    logprobs_NV = (hidden_ND.double() @ weight_VD.double().t() / TEMPERATURE).log_softmax(-1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return logprobs_NV.gather(-1, targets_N[:, None])[:, 0], entropy_N


def _with_gradients(scored: tuple[Tensor, Tensor], hidden_ND: Tensor, weight_VD: Tensor) -> list[Tensor]:
    """Return both statistics, and the gradients of a sum in which every token has a different weight."""
    logprobs_N, entropy_N = scored
    weight_N = torch.linspace(-1, 1, len(logprobs_N), device=logprobs_N.device, dtype=logprobs_N.dtype)
    total = (logprobs_N * weight_N).sum() + 0.3 * (entropy_N * weight_N.flip(0)).sum()
    return [t.detach() for t in (logprobs_N, entropy_N, *torch.autograd.grad(total, (hidden_ND, weight_VD)))]


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).abs().max() / want.abs().max())
