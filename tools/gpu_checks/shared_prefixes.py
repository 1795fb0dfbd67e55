"""Check shared prefixes: attention with more keys than queries, and a policy with and without sharing."""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gpu_checks import attention, numerics
from gpu_checks.attention import HEAD_DIM, HEADS, KV_HEADS, TOLERANCE
from gpu_checks.bench import Bench, Rows, laid_out, packed, policy_config, random_rows
from gpu_checks.report import Figures, Finding
from gpu_checks.shapes import TINY, TINY_ON_CPU
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.attention.registered import varlen_attention
from nemo_rl.models.policy.batching import training_strategy
from nemo_rl.models.training.shared_prefixes import SharedPrefixes

PARTS = [37, 20, 11, 5, 64, 1, 30]
"""Tokens of each part of a layout: two prompts, an answer with two branches, another answer and a separate row."""
PARENTS = [None, None, 0, 2, 2, 1, None]
"""Index of the part before each part; None for prompts and the separate row."""
LENGTHS = [24, 33, 19, 28, 12, 26]
PROMPT_TOKENS = 17
"""Length of the prompt that the first four rows share; the other rows share nothing."""


def kernels(bench: Bench) -> Iterator[Finding]:
    """Compare output and gradients with dense attention in float64, with and without a window or sinks."""
    for dtype, allowed in TOLERANCE.items():
        for window, has_sinks in ((None, False), (16, False), (16, True)):
            tensors = _random_heads(bench.device, dtype, has_sinks)
            want = attention.with_gradients(_dense, [t.double().cpu() for t in tensors], window)
            with attention.watched_kernel(bench.on_gpu) as calls:
                got = attention.with_gradients(_laid_out, tensors, window)
            names = ("output", "grad_query", "grad_key", "grad_value", "grad_sinks")
            errors = {name: attention.relative(g, w) for name, g, w in zip(names, got, want, strict=False)}
            problem = "" if max(errors.values()) <= allowed else "differs from dense attention"
            if dtype == torch.bfloat16 and attention.has_flash(bench) and not calls:
                problem = "torch's varlen flash attention did not run"
            used = "flash" if calls else "sdpa per piece"
            name = f"{str(dtype).removeprefix('torch.')}, window {window}{', sinks' if has_sinks else ''}"
            yield Finding(name, {**errors, "allowed": allowed, "kernel": used}, problem)


def policy(bench: Bench) -> Iterator[Finding]:
    """Compare log-probs and gradients with and without shared prompts with Hugging Face; both are packed."""
    rows = grouped_rows()
    for precision in ("float32", "bfloat16"):
        for shape in TINY if bench.on_gpu else TINY_ON_CPU:
            want, want_gradients, allowed, allowed_gradients = numerics.exact(bench, shape, rows, precision)
            errors, gradient_errors = {}, {}
            for layout, shares in (("alone", False), ("shared", True)):
                keys = {"precision": precision, **_packed(shares=shares)}
                got, gradients = numerics.scores_and_gradients(bench, shape, rows, **keys)
                errors[layout] = float((got - want).abs().max())
                gradient_errors[layout] = numerics.worst_relative(gradients, want_gradients)
            config = policy_config(bench.folder(shape), **keys)
            rank = bench.policy(shape, fresh=False, optimizer=numerics.SGD, **keys)
            shared = laid_out(rank, config, rows, training_strategy(config)).num_shared_tokens
            yield _judged(f"log-probs, {shape}, {precision}", errors, allowed, shared)
            yield _judged(f"gradients, {shape}, {precision}", gradient_errors, allowed_gradients, shared)


def _judged(name: str, errors: dict[str, float], allowed: float, shared: int) -> Finding:
    wrong = [layout for layout, error in errors.items() if not error <= allowed]
    problem = f"{', '.join(wrong)}: farther from Hugging Face than allowed" if wrong else ""
    figures: Figures = {**errors, "allowed": allowed, "shared_tokens": shared}
    return Finding(name, figures, problem if shared else "the policy shares no prompts")


def grouped_rows() -> Rows:
    """Return rows of which four start with the same prompt; only the tokens after it count in the loss."""
    rows: BatchedDataDict[Any] = random_rows(LENGTHS)
    rows["input_ids"][1:4, :PROMPT_TOKENS] = rows["input_ids"][0, :PROMPT_TOKENS]
    rows["token_mask"][:4, :PROMPT_TOKENS] = 0
    return rows


def _packed(*, shares: bool) -> dict[str, Any]:
    keys = packed(128)
    keys["sequence_packing"]["share_prompts"] = shares
    return keys


def _random_heads(device: torch.device, dtype: torch.dtype, has_sinks: bool) -> list[Tensor]:
    """Return random query, key and value `[1, H, T, D]`, and sinks `[H]`."""
    generator = torch.Generator().manual_seed(1)
    shapes: list[tuple[int, ...]] = [(1, heads, sum(PARTS), HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    shapes += [(HEADS,)] if has_sinks else []
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def _laid_out(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, window: int | None) -> Tensor:
    """Compute `[1, T, H, D]` with the library."""
    mask = None if window is None else torch.tensor(window)
    layout = SharedPrefixes(PARTS, PARENTS)
    out, _ = varlen_attention(nn.Module(), query, key, value, mask, s_aux=sinks, divided_row=layout)
    return out


def _dense(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, window: int | None) -> Tensor:
    """Compute `[1, T, H, D]` by definition: a token sees earlier tokens of its part and all parts before its part."""
    starts = list(accumulate(PARTS, initial=0))
    firsts = [sum(PARTS[part] for part in _before(part)) for part in range(len(PARTS))]
    positions = [torch.arange(length) + first for length, first in zip(PARTS, firsts, strict=True)]
    position_T = torch.cat(positions)
    sees_TT = torch.zeros(len(position_T), len(position_T), dtype=torch.bool)
    for number, (start, stop) in enumerate(pairwise(starts)):
        for part in (*_before(number), number):
            sees_TT[start:stop, starts[part] : starts[part + 1]] = True
    distance_TT = position_T[:, None] - position_T[None, :]
    sees_TT &= (distance_TT >= 0) & (distance_TT < (window or len(position_T)))
    return attention.attend_densely(query, key, value, sinks, sees_TT)


def _before(part: int) -> list[int]:
    """Return the parts before a part in its rows."""
    parent = PARENTS[part]
    return [] if parent is None else [*_before(parent), parent]
