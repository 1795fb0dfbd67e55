"""List the sizes that a model may have on its ranks, and write them as keys of its section.

Sizes are powers of two, because the numbers of GPUs, heads and rows usually are. Invariant: a candidate divides the
ranks; whether it is allowed otherwise is checked by the rules of the configuration and the backend.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil
from typing import Any, Literal

from nemo_rl.commands.size.jobs import Job
from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.capacity.memory import microbatch_tokens

MOST_TOKENS = 65536
"""Largest number of tokens of a microbatch on a rank that is proposed, because larger products are not faster."""
_SHORTEST_PART = 2048
_MOST_STAGES, _MOST_EXPERT_RANKS, _MOST_CONTEXT = 16, 64, 16
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Candidate:
    """Sizes of a model."""

    layout: ParallelLayout
    """Sizes of the parallel axes."""
    recompute: Recompute
    """Activations that the backward pass computes again."""
    offload: bool
    """Whether the optimizer state (with DTensor also the weights) is in host memory."""
    rows: int
    """Rows of maximum length in a microbatch."""

    def divisions(self) -> int:
        """Return the product of the sizes that divide the model or the rows; small ones are preferred."""
        axes = self.layout
        return axes.tp * axes.cp * axes.pp * axes.ep


def layouts(job: Job) -> Iterator[ParallelLayout]:
    """Yield all layouts of a job's ranks; none if other models and engines leave it no rank."""
    if job.ranks < 1:
        return
    trains, dtensor = job.role.trains, job.section.backend_key == "dtensor_cfg"
    nodes = job.ranks // job.per_node
    tensor = _powers(job.per_node)
    context = _powers(min(_MOST_CONTEXT, job.length // _SHORTEST_PART))
    stages = _powers(min(_MOST_STAGES, len(job.trace.layers))) if trains else [1]
    if not dtensor:
        stages = [pp for pp in stages if _last_stage(len(job.trace.layers), pp) > 0]
    copies = [1, nodes] if dtensor and nodes > 1 else [1]
    experts = [n for n in _powers(min(_MOST_EXPERT_RANKS, job.num_experts)) if job.num_experts % n == 0] or [1]
    for tp, cp, pp, replicas, ep in product(tensor, context, stages, copies, experts):
        outside = tp * cp * pp * replicas
        if job.ranks % outside == 0 and (job.ranks // pp // replicas) % ep == 0:
            yield ParallelLayout(pp, replicas, job.ranks // outside, cp, tp, ep)


def candidates(job: Job) -> Iterator[Candidate]:
    """Yield all candidates of a job."""
    hows: list[Recompute] = ["none"]
    if job.role.trains:
        hows = ["none", "selective", "full"] if job.section.backend_key == "dtensor_cfg" else ["none", "full"]
    for layout in layouts(job):
        most = min(rows_of_a_rank(job, layout), max(MOST_TOKENS * layout.cp // job.length, 1))
        offloads = (False, True) if job.role.trains else (False,)
        for recompute, offload, samples in product(hows, offloads, _powers(most // job.rows_each)):
            yield Candidate(layout, recompute, offload, samples * job.rows_each)


def rows_of_a_rank(job: Job, layout: ParallelLayout) -> int:
    """Return the rows of an update on each data-parallel rank."""
    return max(ceil(job.batch / layout.data_parallel_size), 1)


def values_of(job: Job, candidate: Candidate) -> dict[str, Any]:
    """Write a candidate as values of the keys of the model's section."""
    section, axes = job.section, candidate.layout
    own = f"{job.name}.{section.backend_key}"
    keys = section.backend_section.size_keys
    sizes = {f"{own}.{keys[axis]}": getattr(axes, axis) for axis in ("tp", "cp", "pp", "dp_replicate") if axis in keys}
    if job.num_experts:
        sizes[f"{own}.{keys['ep']}"] = axes.ep
    if section.backend_key == "dtensor_cfg":
        sizes |= _dtensor_options(own, section, candidate, trains=job.role.trains)
    else:
        sizes |= _megatron_options(own, section, candidate, len(job.trace.layers), trains=job.role.trains)
    return sizes | batching(job, candidate.rows, candidate.rows)


def batching(job: Job, train_rows: int, pass_rows: int) -> dict[str, Any]:
    """Return the keys for the rows of a microbatch in training and in log-prob passes.

    With sequence packing or dynamic batching the keys count tokens. Otherwise those of training count samples, where a
    pair is one sample.
    """
    section = job.section
    for name in ("sequence_packing", "dynamic_batching"):
        if getattr(section, name).enabled:
            sizes = {"train_mb_tokens": train_rows * job.length, "logprob_mb_tokens": pass_rows * job.length}
            return {
                f"{job.name}.{name}.{key}": size for key, size in sizes.items() if job.role.trains or "logprob" in key
            }
    sizes = {"train_micro_batch_size": train_rows // job.rows_each, "logprob_batch_size": pass_rows}
    return {f"{job.name}.{key}": size for key, size in sizes.items() if job.role.trains or "logprob" in key}


def candidate_of(job: Job) -> Candidate:
    """Return the sizes of the configuration as a candidate."""
    section, trains = job.section, job.role.trains
    tokens = microbatch_tokens(section, trains=trains, rows_per_sample=job.rows_each)
    own = section.megatron_cfg if section.backend_key == "megatron_cfg" else section.dtensor_cfg
    how = own.activation_checkpointing
    recompute: Recompute = "selective" if how == "selective" else "full" if how and trains else "none"
    offload = section.dtensor_cfg.cpu_offload
    if section.backend_key == "megatron_cfg":
        offload = section.megatron_cfg.optimizer.optimizer_cpu_offload
    return Candidate(ParallelLayout.of(section, job.ranks), recompute, offload, max(tokens // job.length, 1))


def _dtensor_options(own: str, section: PolicyConfig, candidate: Candidate, *, trains: bool) -> dict[str, Any]:
    how: bool | str = {"none": False, "full": True}.get(candidate.recompute, candidate.recompute)
    options: dict[str, Any] = {f"{own}.sequence_parallel": candidate.layout.tp > 1}
    if trains:
        options |= {f"{own}.activation_checkpointing": how, f"{own}.cpu_offload": candidate.offload}
    if section.dtensor_cfg.virtual_pipeline_size > 1:
        options[f"{own}.virtual_pipeline_size"] = 1
    return options


def _megatron_options(
    own: str, section: PolicyConfig, candidate: Candidate, layers: int, *, trains: bool
) -> dict[str, Any]:
    written, stages = section.megatron_cfg, candidate.layout.pp
    options: dict[str, Any] = {f"{own}.sequence_parallel": candidate.layout.tp > 1}
    if trains:
        options[f"{own}.activation_checkpointing"] = candidate.recompute == "full"
        options[f"{own}.optimizer.optimizer_cpu_offload"] = candidate.offload
        if candidate.offload or written.optimizer.optimizer_offload_fraction:
            options[f"{own}.optimizer.optimizer_offload_fraction"] = float(candidate.offload)
    if candidate.recompute == "full" and written.recompute_granularity != "full":
        options[f"{own}.recompute_granularity"] = "full"
    last = _last_stage(layers, stages) if layers % stages else None
    ends = {"num_layers_in_first_pipeline_stage": None, "num_layers_in_last_pipeline_stage": last}
    ends |= {"virtual_pipeline_model_parallel_size": None}
    return options | {f"{own}.{key}": size for key, size in ends.items() if getattr(written, key) != size}


def _last_stage(layers: int, stages: int) -> int:
    """Return the layers that the last stage has if all others have equally many, rounded up."""
    return layers - (stages - 1) * ceil(layers / stages)


def _powers(most: int) -> list[int]:
    """Return 1, 2, 4 ... up to a number."""
    return [2**power for power in range(max(most, 1).bit_length())]
