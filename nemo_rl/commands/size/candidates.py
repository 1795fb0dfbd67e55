"""List possible sizes of a model on its ranks, write them as keys of its section, and estimate their seconds.

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
"""Largest proposed number of tokens of a microbatch on a rank. Larger products are not faster."""
_SHORTEST_PART = 2048
_MOST_STAGES, _MOST_EXPERT_RANKS, _MOST_CONTEXT = 16, 64, 16
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Candidate:
    """Sizes of a model."""

    layout: ParallelLayout
    """Sizes of the parallel axes."""
    recompute: Recompute
    """Activations that the backward pass recomputes."""
    offload: bool
    """Whether the optimizer state (with DTensor also the weights) is in host memory."""
    rows: int
    """Rows of maximum length in a microbatch."""

    def divisions(self) -> int:
        """Return the product of the sizes that divide the model or the rows. Smaller products are preferred."""
        axes = self.layout
        return axes.tp * axes.cp * axes.pp * axes.ep


def layouts(job: Job) -> Iterator[ParallelLayout]:
    """Yield all layouts of a job's ranks, or none if other models and engines leave it no rank."""
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

    With sequence packing or dynamic batching the keys count tokens. Otherwise the keys of training count samples, where
    a pair is one sample.
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
    """Return the layers of the last stage if all other stages have equally many, rounded up."""
    return layers - (stages - 1) * ceil(layers / stages)


def _powers(most: int) -> list[int]:
    """Return 1, 2, 4 ... up to a number."""
    return [2**power for power in range(max(most, 1).bit_length())]


REACHED = 0.45
"""Share of a GPU's peak that matrix products of a training step reach."""
REACHED_LINK = 0.7
"""Share of a link's bandwidth that collectives reach."""
STARTING_TOKENS = 256
"""Cost of the start and the end of a microbatch, in tokens, on a rank that has whole layers."""
PACKED_SHARE = 0.5
"""Mean length of rows as a share of the maximum, for the number of packed microbatches of a pipeline."""
LAYER_LAUNCH_S = 4e-4
"""Seconds that the host needs to start the kernels of a layer's forward and backward pass."""
HOST_LINK_GB_S = 25.0
"""Bandwidth between a GPU and host memory."""
HOST_MEMORY_GB_S = 10.0
"""Bandwidth of host memory for the optimizer of one rank."""
_COMPUTED_AGAIN = {"none": 0.0, "selective": 0.15, "full": 1.0}
"""Share of a forward pass that a backward pass recomputes, by kind of recomputation."""
_TWO_BYTES, _FOUR_BYTES, _STATE_BYTES = 2, 4, 16


@dataclass(frozen=True)
class Seconds:
    """Seconds of an update of one model."""

    compute: float
    """Longest of computation, start of kernels, and gathering of weights."""
    tensor: float
    """Exchanges between tensor-parallel ranks."""
    context: float
    """Exchanges of keys and values."""
    experts: float
    """Exchanges of tokens between the ranks of experts."""
    data: float
    """Exchanges of gradients that do not overlap with computation."""
    bubble: float
    """Time in which pipeline stages wait for each other."""
    offload: float
    """Copies from and to host memory, and the optimizer step there."""

    @property
    def total(self) -> float:
        """All seconds."""
        return sum(vars(self).values())


def update_seconds(job: Job, candidate: Candidate) -> Seconds:
    """Estimate an update: forward and backward passes of all microbatches, or forward passes of a frozen model."""
    return _Update(job, candidate, candidate.layout).seconds()


@dataclass(frozen=True)
class _Update:
    job: Job
    candidate: Candidate
    axes: ParallelLayout

    @property
    def microbatches(self) -> int:
        """Microbatches of a data-parallel rank."""
        return ceil(rows_of_a_rank(self.job, self.axes) / self.candidate.rows)

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on a context-parallel rank."""
        rows = min(self.candidate.rows, rows_of_a_rank(self.job, self.axes))
        return rows * self.job.length / self.axes.cp

    @property
    def layers(self) -> float:
        """Layers of a stage."""
        return len(self.job.trace.layers) / self.axes.pp

    @property
    def passes(self) -> float:
        """Cost of a microbatch in forward passes. A backward pass costs two, or one without gradients of weights."""
        if not self.job.role.trains:
            return 1.0
        return (2.0 if self.job.adapts else 3.0) + _COMPUTED_AGAIN[self.candidate.recompute]

    @property
    def reduces(self) -> bool:
        """True if all weights have gradients and optimizer state, which are small for adapters."""
        return self.job.role.trains and not self.job.adapts

    @property
    def crossings(self) -> int:
        """Number of passes through a layer that exchange activations: forward, backward, and recomputation."""
        return 1 + self.job.role.trains + (self.candidate.recompute == "full")

    def seconds(self) -> Seconds:
        """Add up the parts."""
        compute = max(self._compute(), self.microbatches * self.layers * LAYER_LAUNCH_S * self.passes / 3)
        gathers, data = self._data()
        worked = max(compute, gathers)
        tensor, context, experts = self._tensor(), self._context(), self._experts()
        packed = PACKED_SHARE if self.job.section.sequence_packing.enabled else 1.0
        idle = (self.axes.pp - 1) / max(self.microbatches * packed, 1)
        bubble = (worked + tensor + context + experts) * idle + self._between_stages()
        return Seconds(worked, tensor, context, experts, data, bubble, self._offload())

    def _compute(self) -> float:
        """Return the seconds of computation in the slowest stage, which is the last one, because it has the head."""
        job, tp = self.job, self.axes.tp
        scores = 2 * job.attention_width * job.length  # causal: half of all pairs of tokens
        layers = ceil(self.layers) / len(job.trace.layers)
        head = job.trace.hidden * job.trace.vocabulary
        inside = 2 * layers * (job.multiplied - head) + ceil(self.layers) * scores
        tokens = self.tokens + STARTING_TOKENS * tp
        operations = self.microbatches * tokens * self.passes * (inside + 2 * head)
        return operations / tp / (job.gpu.tflops * 1e12 * REACHED)

    def _between_stages(self) -> float:
        """Return the seconds in which hidden states go from stage to stage, and their gradients back."""
        stages = self.axes.pp
        moved = (stages > 1) * 2 * self.job.trace.hidden * _TWO_BYTES * self.tokens
        return self.microbatches * moved / self._bandwidth(self.axes.num_ranks)

    def _tensor(self) -> float:
        """Return the seconds of two all-reduces of the hidden states in each layer and pass.

        With sequence parallelism the exchanged bytes are the same.
        """
        tp = self.axes.tp
        moved = 2 * 2 * (tp - 1) / tp * self.job.trace.hidden * _TWO_BYTES * self.tokens * self.crossings
        return self.microbatches * self.layers * moved / self._bandwidth(tp)

    def _context(self) -> float:
        cp, tp = self.axes.cp, self.axes.tp
        moved = (cp - 1) * self.job.key_value_width * _TWO_BYTES * self.tokens * self.crossings / tp
        return self.microbatches * self.layers * moved / self._bandwidth(tp * cp)

    def _experts(self) -> float:
        """Return the seconds in which each token is sent to its experts and back."""
        ep, job = self.axes.ep, self.job
        if ep == 1:
            return 0.0
        chosen = max(round(job.active_share * job.num_experts), 1)
        share = sum(bool(layer.experts) for layer in job.trace.layers) / len(job.trace.layers)
        moved = 2 * chosen * (ep - 1) / ep * job.trace.hidden * _TWO_BYTES * self.tokens * self.crossings / self.axes.tp
        return self.microbatches * self.layers * share * moved / self._bandwidth(ep)

    def _data(self) -> tuple[float, float]:
        """Return the seconds of FSDP's exchanges, which overlap with computation, and of all other exchanges."""
        axes, held = self.axes, self._dense_elements() + self._expert_elements()
        if self.job.section.backend_key != "dtensor_cfg":
            ranks = axes.data_parallel_size * axes.cp
            moved = held * (_FOUR_BYTES + _TWO_BYTES) * (ranks - 1) / ranks
            return 0.0, moved / self._bandwidth(ranks * axes.tp) * self.reduces
        shards = axes.dp_shard * axes.cp
        share = (shards - 1) / shards
        gathers = self.microbatches if axes.pp == 1 else 1
        each = held * share * _TWO_BYTES * (1 + self.job.role.trains)
        reduced = held * share * _FOUR_BYTES * self.reduces
        copies = 2 * (axes.dp_replicate - 1) / axes.dp_replicate * held / shards * _FOUR_BYTES * self.reduces
        inside = self._bandwidth(shards * axes.tp)
        hidden = (gathers * each + self.microbatches * reduced) / inside
        return hidden, self.microbatches * copies / self._bandwidth(axes.num_ranks)

    def _offload(self) -> float:
        if not self.candidate.offload:
            return 0.0
        axes, held = self.axes, self._dense_elements() + self._expert_elements()
        mine = held / (axes.data_parallel_size // axes.dp_replicate * axes.cp)
        copies = 2 * self.reduces if self.job.is_megatron else (2 + self.reduces) * self.microbatches
        state = _STATE_BYTES * self.reduces
        return mine * (copies * _FOUR_BYTES / HOST_LINK_GB_S + state / HOST_MEMORY_GB_S) / 1e9

    def _dense_elements(self) -> float:
        """Return the elements of a stage on a tensor-parallel rank, without elements of experts."""
        trace = self.job.trace
        inside = sum(layer.matrices + layer.vectors for layer in trace.layers) / self.axes.pp
        outside = 0 if trace.tied else trace.embedding.total
        return (inside + (outside + trace.last.total) / self.axes.pp) / self.axes.tp

    def _expert_elements(self) -> float:
        """Return the elements of a stage's experts that a rank computes with."""
        inside = sum(layer.experts for layer in self.job.trace.layers) / self.axes.pp
        return inside / (self.axes.ep if self.axes.ep > 1 else self.axes.tp)

    def _bandwidth(self, ranks: int) -> float:
        """Return bytes a second between neighbouring ranks: over the network if the group is larger than a machine."""
        gpu = self.job.gpu
        speed = gpu.link_gb_s if ranks <= self.job.per_node else gpu.network_gb_s
        return speed * 1e9 * REACHED_LINK
