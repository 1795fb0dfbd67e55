"""Measure how fast a rank trains and scores, its memory, and the time of moving its state."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gpu_checks.attention import with_version_3
from gpu_checks.bench import GIB, Bench, Rows, laid_out, packed, policy_config, random_rows, scores, update
from gpu_checks.report import Figures, Finding
from gpu_checks.shapes import SHAPES
from nemo_rl.config import PolicyConfig
from nemo_rl.models.huggingface.sizes import model_flops, peak_tflops
from nemo_rl.models.policy.batching import training_strategy
from nemo_rl.models.policy.workers.rank import PolicyRank, UpdateResult


@dataclass(frozen=True)
class Sizes:
    """Sizes of the speed checks, in tokens.

    Attributes:
        row: tokens of every sequence.
        batch: tokens of one optimizer update.
        packs: tokens of a microbatch, values to compare.
        chunks: tokens whose logits are held at the same time, values to compare.
        long_row: tokens of a sequence that fills a pack.
        group: tokens of a prompt, number of its answers, tokens of each.
    """

    row: int
    batch: int
    packs: tuple[int, ...]
    chunks: tuple[int, ...]
    long_row: int
    group: tuple[int, int, int]


ON_GPU = Sizes(1024, 65536, (2048, 8192, 16384), (512, 2048, 4096), long_row=8192, group=(2000, 16, 200))
ON_CPU = Sizes(64, 512, (128, 256), (64, 256), long_row=256, group=(64, 8, 12))
REPEATS = 2


def training(bench: Bench) -> Iterator[Finding]:
    """Measure whole optimizer updates, by tokens per pack."""
    rank, rows, sizes = bench.large_policy(), _rows(bench), _sizes(bench)
    for pack in sizes.packs:
        work = partial(update, rank, _config(bench, pack), rows)
        yield _rate(bench, rank, f"packs of {pack}", work, backward=True)


def long_rows(bench: Bench) -> Iterator[Finding]:
    """Measure updates and log-prob passes whose packs are one long sequence, where attention takes most time."""
    rank, config, rows = bench.large_policy(), _config(bench, _sizes(bench).long_row), _long_rows(bench)
    yield _rate(bench, rank, "training", partial(update, rank, config, rows), backward=True, rows=rows)
    yield _rate(bench, rank, "log-probs", partial(scores, rank, config, rows), backward=False, rows=rows)


def shared_prompts(bench: Bench) -> Iterator[Finding]:
    """Measure updates and log-prob passes over groups of answers; tokens count once per row, so that rates compare."""
    rank, rows = bench.large_policy(), _groups(bench)
    for shares in (False, True):
        packing = packed(_sizes(bench).packs[1])
        packing["sequence_packing"]["share_prompts"] = shares
        config = policy_config(bench.folder(bench.large), precision="bfloat16", **packing)
        saved = laid_out(rank, config, rows, training_strategy(config)).num_shared_tokens
        passes: dict[str, Callable[[PolicyRank, PolicyConfig, Rows], object]] = {
            "training": update,
            "log-probs": scores,
        }
        for kind, work in passes.items():
            name = f"{kind}, {'shared' if shares else 'alone'}"
            found = _rate(bench, rank, name, partial(work, rank, config, rows), backward=kind == "training", rows=rows)
            yield replace(found, figures={**found.figures, "shared_tokens": saved})


def compiled(bench: Bench) -> Iterator[Finding]:
    """Measure updates with compiled layers after the same ones without, and how long the first update takes."""
    # CPUs have compiled the layers in this precision for an earlier check.
    keys: dict[str, Any] = {"precision": "bfloat16" if bench.on_gpu else "float32"}
    passes = [
        ("short rows", _sizes(bench).packs[1], _rows(bench)),
        ("long rows", _sizes(bench).long_row, _long_rows(bench)),
    ]
    plain = bench.large_policy(**keys)
    before = {
        name: _rate(
            bench, plain, f"{name}, not compiled", partial(update, plain, _config(bench, pack), rows), rows=rows
        )
        for name, pack, rows in passes
    }
    yield from before.values()
    del plain
    rank = bench.large_policy(**keys, dtensor_cfg={"compile_layers": True})
    for name, pack, rows in passes:
        work = partial(update, rank, _config(bench, pack), rows)
        figures: Figures = {"first_s": _seconds(bench, work)}
        found = _rate(bench, rank, f"{name}, compiled", work, rows=rows)
        was, now = before[name].figures.get("seconds"), found.figures.get("seconds")
        if isinstance(was, float) and isinstance(now, float):
            figures["times_as_fast"] = was / now
        yield replace(found, figures={**found.figures, **figures})
    bench.end_policy()


def flash_attention_3(bench: Bench) -> Iterator[Finding]:
    """Measure the same as `long_rows` with FlashAttention 3, where it is installed and runs."""
    yield from with_version_3(bench, long_rows)


def microbatch(bench: Bench) -> Iterator[Finding]:
    """Measure what one more microbatch adds to an update: number of kernels, their time, and wall-clock time."""
    rank = bench.large_policy()
    for pack in _sizes(bench).packs[:2]:
        yield _microbatch(bench, rank, pack)


def scoring(bench: Bench) -> Iterator[Finding]:
    """Measure log-prob passes, by tokens per pack."""
    rank, rows = bench.large_policy(), _rows(bench)
    for pack in _sizes(bench).packs:
        work = partial(scores, rank, _config(bench, pack), rows)
        yield _rate(bench, rank, f"packs of {pack}", work, backward=False)


def chunks(bench: Bench) -> Iterator[Finding]:
    """Measure optimizer updates, by tokens whose logits are held at the same time."""
    for chunk in _sizes(bench).chunks:
        yield _updates_with(bench, f"{chunk} tokens", logprob_chunk_size=chunk)


def gathered(bench: Bench) -> Iterator[Finding]:
    """Measure optimizer updates of several microbatches, by whether weights stay gathered between them."""
    for keeps, name in ((False, "freed"), (True, "kept")):
        yield _updates_with(bench, name, precision="bfloat16", dtensor_cfg={"keep_gathered": keeps})


def _updates_with(bench: Bench, name: str, **values: Any) -> Finding:
    """Measure updates of a new rank; only this function holds it, because two do not fit on every device."""
    rank = bench.large_policy(**values)
    work = partial(update, rank, _config(bench, _sizes(bench).packs[1]), _rows(bench))
    return _rate(bench, rank, name, work, backward=True)


def offload(bench: Bench) -> Iterator[Finding]:
    """Move the optimizer state to the host and back; the first move may allocate buffers that the second one reuses."""
    rank, rows = bench.large_policy(), _rows(bench)
    config = _config(bench, bench.large_pack)
    update(rank, config, rows)
    held = _held_gib(bench)
    for attempt in ("first", "second"):
        out_s = _seconds(bench, lambda: rank.move_optimizer_state(to_host=True))
        freed = None if held is None else held - (_held_gib(bench) or 0.0)
        back_s = _seconds(bench, lambda: rank.move_optimizer_state(to_host=False))
        yield Finding(f"optimizer state, {attempt} time", {"out_s": out_s, "back_s": back_s, "freed_gib": freed})
    with_reference = _seconds(bench, lambda: scores(rank, config, rows, reference=True))
    alone = _seconds(bench, lambda: scores(rank, config, rows))
    yield Finding("reference weights in and out", {"swap_s": with_reference - alone, "scoring_s": alone})


def checkpoint(bench: Bench) -> Iterator[Finding]:
    """Measure a checkpoint with optimizer state: how long it blocks training, its total time, and its size."""
    rank = bench.large_policy()
    update(rank, _config(bench, bench.large_pack), _rows(bench))
    for background in (False, True):
        with TemporaryDirectory(dir=bench.setting.folder) as folder:
            save = partial(rank.save_checkpoint, f"{folder}/weights", f"{folder}/optimizer", background)
            held_s = _seconds(bench, save)
            rest_s = _seconds(bench, rank.finish_checkpoint)
            written = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()) / 1e9
        figures: Figures = {"held_up_s": held_s, "seconds": held_s + rest_s, "gb": written}
        yield Finding("in the background" if background else "at once", figures)


def matrix_product(bench: Bench) -> Iterator[Finding]:
    """Measure the device's speed on one large product, for comparison with the utilisation."""
    size = 8192 if bench.on_gpu else 256
    left, right = (torch.randn(size, size, device=bench.device).bfloat16() for _ in range(2))
    repeats = 20
    left @ right
    seconds = _seconds(bench, lambda: [left @ right for _ in range(repeats)]) / repeats
    yield Finding(f"bfloat16, {size} cubed", {"tflops": 2 * size**3 / seconds / 1e12, "peak_tflops": _peak(bench)})


def _sizes(bench: Bench) -> Sizes:
    return ON_GPU if bench.on_gpu else ON_CPU


def _config(bench: Bench, pack: int) -> PolicyConfig:
    """Return the policy section that sets how rows are packed."""
    return policy_config(bench.folder(bench.large), precision="bfloat16", **packed(pack))


def _rows(bench: Bench, num_tokens: int | None = None) -> Rows:
    """Return full rows of random tokens."""
    sizes = _sizes(bench)
    count = (num_tokens or sizes.batch) // sizes.row
    return random_rows([sizes.row] * count, SHAPES[bench.large].fields["vocab_size"] - 8)


def _long_rows(bench: Bench) -> Rows:
    sizes = _sizes(bench)
    return random_rows([sizes.long_row] * (sizes.batch // sizes.long_row), SHAPES[bench.large].fields["vocab_size"] - 8)


def _groups(bench: Bench) -> Rows:
    """Return two groups of answers to one prompt each; only answers count in the loss."""
    prompt, answers, tokens = _sizes(bench).group
    rows = random_rows([prompt + tokens] * 2 * answers, SHAPES[bench.large].fields["vocab_size"] - 8)
    for first in (0, answers):
        rows["input_ids"][first : first + answers, :prompt] = rows["input_ids"][first, :prompt]
    rows["token_mask"][:, :prompt] = 0
    return rows


def _rate(
    bench: Bench,
    rank: PolicyRank,
    name: str,
    work: Callable[[], object],
    *,
    backward: bool = True,
    rows: Rows | None = None,
) -> Finding:
    """Measure tokens per second, utilisation and peak memory of a pass over the rows; None: those of `_rows`."""
    lengths, refusal = Counter((_rows(bench) if rows is None else rows)["input_lengths"].tolist()), ""
    try:
        first = work()
        bench.reset_peak()
        seconds = min(_seconds(bench, work) for _ in range(REPEATS))
    except torch.OutOfMemoryError as error:
        refusal = f"out of memory: {str(error).splitlines()[0][:150]}"
    if refusal:  # after the handler, whose traceback keeps tensors alive
        bench.empty_cache()
        return Finding(name, {}, refusal)
    flops = model_flops(rank.backend.model.hf.config)  # type: ignore[attr-defined]
    rate = sum(length * count for length, count in lengths.items()) / seconds
    tflops = (flops.training(lengths) if backward else flops.forward(lengths)) / seconds / 1e12
    peak = _peak(bench)
    figures: Figures = {"tokens_per_s": rate, "tflops": tflops, "mfu": None if peak is None else tflops / peak}
    skipped = isinstance(first, UpdateResult) and first.skipped
    problem = "the gradient was not finite, so there was no optimizer step" if skipped else ""
    return Finding(name, {**figures, "seconds": seconds, "peak_gib": bench.peak_gib()}, problem)


def _microbatch(bench: Bench, rank: PolicyRank, pack: int) -> Finding:
    """Measure the difference between updates of three microbatches and of one, per microbatch."""
    config, few, many = _config(bench, pack), 1, 3
    counts, kernel_us, walls = [], [], []
    for number in (few, many):
        work = partial(update, rank, config, _rows(bench, number * pack))
        work()
        walls.append(min(_seconds(bench, work) for _ in range(REPEATS)))
        kernels = _kernels(bench, work)
        counts.append(len(kernels))
        kernel_us.append(sum(kernels))
    more = many - few
    wall_ms = 1e3 * (walls[1] - walls[0]) / more
    what, busy_ms = ("kernels", 1e-3 * (kernel_us[1] - kernel_us[0]) / more) if bench.on_gpu else ("operators", None)
    figures: Figures = {what: (counts[1] - counts[0]) / more, "kernel_ms": busy_ms, "wall_ms": wall_ms}
    return Finding(f"packs of {pack}", figures)


def _kernels(bench: Bench, work: Callable[[], object]) -> list[float]:
    """Return the microseconds of each GPU kernel except copies, or of each operator on the CPU."""
    kind = DeviceType.CUDA if bench.on_gpu else DeviceType.CPU
    activity = ProfilerActivity.CUDA if bench.on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        work()
        bench.synchronize()
    events = [e for e in profiler.events() or [] if e.device_type == kind and not e.is_user_annotation]
    return [e.time_range.elapsed_us() for e in events if not e.name.startswith(("Memcpy", "Memset"))]


def _seconds(bench: Bench, work: Callable[[], object]) -> float:
    bench.synchronize()
    began = time.perf_counter()
    work()
    bench.synchronize()
    return time.perf_counter() - began


def _held_gib(bench: Bench) -> float | None:
    return torch.cuda.memory_allocated() / GIB if bench.on_gpu else None


def _peak(bench: Bench) -> float | None:
    return peak_tflops(torch.cuda.get_device_name(bench.device)) if bench.on_gpu else None
