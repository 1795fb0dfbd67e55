"""Compare predicted memory with the allocator's measurement, and measure what selective recomputation saves."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from transformers import AutoConfig

from gpu_checks.bench import GIB, Bench, packed, policy_config, random_rows, scores, update
from gpu_checks.report import Figures, Finding
from gpu_checks.shapes import SHAPES
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.capacity.memory import Work
from nemo_rl.models.dtensor.mesh_check import DTensorRank

RECOMPUTATION: dict[str, Any] = {"nothing": False, "whole layers": True, "selected": "selective"}
_MOST = 1.25
"""Allowed ratio of measured to predicted memory: the allocator rounds, and libraries need workspaces."""
_LEAST_SAVED = 0.9
"""With selective recomputation an update takes at most this share of its memory without."""


def predicted(bench: Bench) -> Iterator[Finding]:
    """Check the peaks of updates and of log-prob passes of the large model, by what is recomputed."""
    peaks: dict[str, float] = {}
    for name, how in RECOMPUTATION.items():
        keys = {"dtensor_cfg": {"activation_checkpointing": how}}
        config = policy_config(bench.folder(bench.large), precision="bfloat16", **packed(bench.large_pack), **keys)
        rank, rows = bench.large_policy(**keys), _rows(bench)
        passes: dict[str, Callable[[], object]] = {"training": partial(update, rank, config, rows)}
        if name == "nothing":
            passes["log-probs"] = partial(scores, rank, config, rows)
        for kind, work in passes.items():
            work()
            bench.synchronize()
            bench.reset_peak()
            work()
            bench.synchronize()
            trains = kind == "training"
            task = Work(bench.large_pack, trains=trains, keeps_reference=True, on_cpu=not bench.on_gpu)
            model = AutoConfig.from_pretrained(bench.folder(bench.large))
            plan = DTensorRank.predict(config, ParallelLayout(), model, task)
            measured = bench.peak_gib()
            figures: Figures = {"predicted_gib": plan.peak / GIB, "measured_gib": measured}
            problem = ""
            if measured is not None:
                peaks[f"{kind}, {name}"] = measured
                if trains and measured > _MOST * plan.peak / GIB:
                    problem = "more than predicted"
            yield Finding(f"{kind}, recomputing {name}", figures, problem)
    yield _saved(peaks)
    bench.end_policy()


def _saved(peaks: dict[str, float]) -> Finding:
    """Check that selective recomputation saves memory: its operators' names must match those on this device."""
    if not peaks:
        return Finding("selective recomputation", {"share": None})
    share = peaks["training, selected"] / peaks["training, nothing"]
    problem = (
        "" if share <= _LEAST_SAVED else "saves nothing: the names of its operators may not be those of this device"
    )
    return Finding("selective recomputation", {"share": share}, problem)


def _rows(bench: Bench) -> Any:
    """Return two microbatches of full rows."""
    row = bench.large_pack // 2
    return random_rows([row] * 4, SHAPES[bench.large].fields["vocab_size"] - 8)
