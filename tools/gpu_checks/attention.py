"""Compare the attention of packed rows with dense attention in float64."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from gpu_checks.bench import Bench
from gpu_checks.report import Finding
from nemo_rl.models.attention import Scoring
from nemo_rl.models.attention.flash_attn import flash_attention, why_not_3
from nemo_rl.models.attention.registered import varlen_attention
from nemo_rl.models.generation.continuous import TokenCache

LENGTHS = [37, 1, 64, 90]
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
type Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, int | None], Tensor]
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.03}
"""Largest allowed error, relative to the largest value."""
_FLASH_CAPABILITY = (8, 0)


def kernels(bench: Bench) -> Iterator[Finding]:
    """Check output and gradients, grouped queries, with and without a window or sinks, in both precisions."""
    for dtype, allowed in TOLERANCE.items():
        for window, has_sinks in ((None, False), (16, False), (16, True)):
            tensors = _random_heads(bench.device, dtype, has_sinks)
            want = with_gradients(_dense, [t.double().cpu() for t in tensors], window)
            with watched_kernel(bench.on_gpu) as calls:
                got = with_gradients(_packed, tensors, window)
            names = ("output", "grad_query", "grad_key", "grad_value", "grad_sinks")
            errors = {name: relative(g, w) for name, g, w in zip(names, got, want, strict=False)}
            problem = "" if max(errors.values()) <= allowed else "differs from dense attention"
            if dtype == torch.bfloat16 and has_flash(bench) and not calls:
                problem = "torch's varlen flash attention did not run"
            used = "flash" if calls else "sdpa per segment"
            name = f"{str(dtype).removeprefix('torch.')}, window {window}{', sinks' if has_sinks else ''}"
            yield Finding(name, {**errors, "allowed": allowed, "kernel": used}, problem)


def cached(bench: Bench) -> Iterator[Finding]:
    """Check passes of an engine: first all but the last tokens of each segment, then one token of each at a time."""
    for dtype, allowed in TOLERANCE.items():
        for window, has_sinks in ((None, False), (16, False), (16, True)):
            tensors = _random_heads(bench.device, dtype, has_sinks)
            with torch.no_grad(), watched_kernel(bench.on_gpu) as calls:
                got = _in_passes(tensors, window).double().cpu()
            want = with_gradients(_dense, [t.double().cpu() for t in tensors], window)[0]
            error = relative(got, want)
            problem = "" if error <= allowed else "differs from dense attention"
            if dtype == torch.bfloat16 and has_flash(bench) and not calls:
                problem = "torch's varlen flash attention did not run"
            name = f"{str(dtype).removeprefix('torch.')}, window {window}{', sinks' if has_sinks else ''}"
            yield Finding(name, {"output": error, "allowed": allowed}, problem)


def _in_passes(tensors: list[Tensor], window: int | None) -> Tensor:
    """Compute `[1, T, H, D]` of the segments with a cache; the last five tokens of each come one by one."""
    query, key, value, *sinks = (t if t.dim() == 1 else t[0].transpose(0, 1)[:, None] for t in tensors)
    scoring = Scoring(window=window, sinks=sinks[0] if sinks else None)
    cache, out = TokenCache(sum(LENGTHS), query.device), torch.empty_like(query)
    starts = [sum(LENGTHS[:number]) for number in range(len(LENGTHS))]
    read = [max(1, length - 5) for length in LENGTHS]
    for number, length in enumerate(read):
        cache.enter(str(number), range(1000 * number, 1000 * number + length))
    columns = [torch.arange(start, start + length) for start, length in zip(starts, read, strict=True)]
    rows: dict[str, list[int]] = {str(number): [] for number in range(len(LENGTHS))}
    while rows:
        column = torch.cat([columns[int(row)] for row in rows]).to(query.device)
        found = cache.read(rows).attend(1, query[column], key[column], value[column], scoring)
        out[column] = found.unflatten(2, (HEADS, HEAD_DIM))
        ends = {row: int(columns[int(row)][-1]) + 1 for row in rows}
        rows = {row: [0] for row, end in ends.items() if end < starts[int(row)] + LENGTHS[int(row)]}
        for row in rows:
            columns[int(row)] = torch.tensor([ends[row]])
    return out[:, 0][None]


def version_3(bench: Bench) -> Iterator[Finding]:
    """Check the same with FlashAttention 3, and attention with more keys than queries, where it is installed."""
    from gpu_checks import shared_prefixes  # it imports this module

    yield from with_version_3(bench, kernels, shared_prefixes.kernels)


def with_version_3(bench: Bench, *checks: Callable[[Bench], Iterator[Finding]]) -> Iterator[Finding]:
    """Run checks with FlashAttention 3; where it cannot run, report the reason."""
    refusal = why_not_3(bench.device)
    if refusal:
        yield Finding("not run", {"reason": refusal})
        return
    with flash_attention(3, bench.device):
        for check in checks:
            yield from check(bench)


def has_flash(bench: Bench) -> bool:
    """Return whether torch's varlen flash attention runs on this device."""
    return bench.on_gpu and torch.cuda.get_device_capability(bench.device) >= _FLASH_CAPABILITY


@contextmanager
def watched_kernel(on_gpu: bool) -> Iterator[list[str]]:
    """Record each call of torch's kernel; the wrapper keeps its signature, which the library inspects."""
    calls: list[str] = []
    if not on_gpu:
        yield calls
        return
    from torch.nn.attention import varlen  # imports torch's compiler, which takes seconds

    kernel = varlen.varlen_attn

    @functools.wraps(kernel)
    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append("called")
        return kernel(*args, **kwargs)

    with mock.patch.object(varlen, "varlen_attn", watched):
        yield calls


def _random_heads(device: torch.device, dtype: torch.dtype, has_sinks: bool) -> list[Tensor]:
    """Return random query, key and value `[1, H, T, D]`, and sinks `[H]`."""
    generator = torch.Generator().manual_seed(1)
    heads = [(1, heads, sum(LENGTHS), HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    shapes: list[tuple[int, ...]] = [*heads, (HEADS,)] if has_sinks else [*heads]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def _packed(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, window: int | None) -> Tensor:
    """Compute `[1, T, H, D]` with the library."""
    bounds = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(query.device)
    mask = None if window is None else torch.tensor(window)
    longest = max(LENGTHS)
    out, _ = varlen_attention(
        nn.Module(), query, key, value, mask, s_aux=sinks, cu_seq_lens_q=bounds, max_length_q=longest
    )
    return out


def _dense(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, window: int | None) -> Tensor:
    """Compute `[1, T, H, D]` by definition: one matrix of scores over all segments."""
    segment_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    position_T = torch.arange(sum(LENGTHS))
    distance_TT = position_T[:, None] - position_T[None, :]
    sees_TT = (segment_T[:, None] == segment_T[None, :]) & (distance_TT >= 0)
    if window is not None:
        sees_TT &= distance_TT < window
    return attend_densely(query, key, value, sinks, sees_TT)


def attend_densely(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, sees_TT: Tensor) -> Tensor:
    """Compute `[1, T, H, D]`, where query t sees key u if `sees_TT[t, u]`; a sink is one more column of scores."""
    key, value = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (key, value))
    scores_HTT = query @ key.transpose(-1, -2) * HEAD_DIM**-0.5
    scores_HTT = scores_HTT.masked_fill(~sees_TT, float("-inf"))
    if sinks is not None:
        scores_HTT = torch.cat([scores_HTT, sinks.view(1, -1, 1, 1).expand(*scores_HTT.shape[:-1], 1)], dim=-1)
    weights_HTT = scores_HTT.softmax(-1)[..., : len(sees_TT)]
    return (weights_HTT @ value).transpose(1, 2)


def with_gradients(attend: Attend, tensors: list[Tensor], window: int | None) -> list[Tensor]:
    """Return the output and the gradients of a weighted sum of it, in float64 on the CPU."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    query, key, value, *sinks = leaves
    out = attend(query, key, value, sinks[0] if sinks else None, window)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    gradients = torch.autograd.grad((out * weight.to(out)).sum(), leaves)
    return [t.detach().double().cpu() for t in (out, *gradients)]


def relative(got: Tensor, want: Tensor) -> float:
    """Return the largest error, relative to the largest value."""
    return float((got - want).abs().max() / want.abs().max())
