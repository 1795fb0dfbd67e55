"""Estimate the seconds of an update for the sizes of a model, to compare candidates.

The estimate is the sum of the time in which a rank computes and the time in which it waits; docs/machines/sizing.md
describes the model. All rows have the maximum length. Sources: Chowdhery et al. 2022 (arXiv:2204.02311, appendix B) for
operations, Shoeybi et al. 2019 (arXiv:1909.08053) for exchanges of tensor parallelism, Narayanan et al. 2021
(arXiv:2104.04473) for the bubble of a pipeline.

Invariant: only ratios between candidates of one job mean something; no constant was measured on a GPU.
"""

from dataclasses import dataclass
from math import ceil

from nemo_rl.commands.size.candidates import Candidate, rows_of_a_rank
from nemo_rl.commands.size.jobs import Job
from nemo_rl.distributed.parallel_layout import ParallelLayout

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
"""Forward passes in which a backward pass computes activations again."""
_TWO_BYTES, _FOUR_BYTES, _STATE_BYTES = 2, 4, 16


@dataclass(frozen=True)
class Seconds:
    """Seconds of an update of one model."""

    compute: float
    """The longest of computation, start of kernels, and gathering of weights."""
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
    """Copies from and to host memory, and the optimizer there."""

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
        """Forward passes that a microbatch is worth: a backward pass is two, without gradients of weights one."""
        if not self.job.role.trains:
            return 1.0
        return (2.0 if self.job.adapts else 3.0) + _COMPUTED_AGAIN[self.candidate.recompute]

    @property
    def reduces(self) -> bool:
        """True if all weights have gradients and optimizer state; those of adapters are small."""
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
        """Return the seconds of FSDP's exchanges, which overlap with computation, and of those that do not overlap."""
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
        """Return the elements of a stage on a tensor-parallel rank, without those of experts."""
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
