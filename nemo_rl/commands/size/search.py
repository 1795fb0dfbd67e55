"""Find the sizes with the fewest estimated seconds that pass the rules, the backend's checks and the memory plan.

The candidates are checked in the order of their estimates, so most of them are never checked. Invariant: the rules of
the configuration, the training backend and its memory plan decide whether sizes are allowed, never this module.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import ceil, floor, log

from nemo_rl.algorithms.setup.memory_forecast import USABLE_SHARE
from nemo_rl.commands.size.candidates import (
    REACHED,
    REACHED_LINK,
    Candidate,
    Seconds,
    candidates,
    update_seconds,
    values_of,
)
from nemo_rl.commands.size.jobs import Job, with_values
from nemo_rl.config import MasterConfig, RolloutMasterConfig, plan_topology
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.capacity.memory import EngineMemory, MemoryPlan, engine_memory
from nemo_rl.models.generation.factory import check_engine_model, engine_precision
from nemo_rl.models.huggingface.load import torch_dtype
from nemo_rl.models.quantization import weight_quantization
from nemo_rl.utils.errors import ConfigError

ENGINE = "policy.generation.engine"
MOST_SHARE = 0.9
"""Largest share of a GPU that is proposed for an engine."""
STEP_OF_SHARE = 0.05
_ROUNDING = 1e-9
MOST_RUNNING = 1024
"""Number of answers that vLLM runs at the same time on devices of at least 70 GiB (`EngineArgs.get_batch_defaults`)."""
REACHED_MEMORY = 0.6
"""Share of the memory's bandwidth that a decoding step reaches."""
EXCHANGE_S = 1.5e-5
"""Duration in seconds of a small exchange between the ranks of an engine. Each layer has two."""
STEP_S = 2e-3
"""Duration in seconds of the part of a decoding step that does not depend on its size."""


@dataclass(frozen=True)
class EngineChoice:
    """Sizes of the engines."""

    tensor: int
    """Number of ranks that divide each layer."""
    stages: int
    """Number of stages of layers."""
    experts: int
    """Number of ranks that divide the experts."""
    share: float
    """`gpu_memory_utilization`."""
    engines: int
    answers: int
    """Number of answers of a training step for each engine."""
    room: int
    """Number of answers of full length that fit into the engine's cache."""
    seconds: float
    """Estimated seconds to sample a step."""

    def values(self) -> dict[str, object]:
        """Write the sizes as values of keys."""
        return _sizes(self.tensor, self.stages, self.experts) | {f"{ENGINE}.gpu_memory_utilization": self.share}


def _sizes(tensor: int, stages: int, experts: int) -> dict[str, object]:
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "expert_parallel_size": experts}
    return {f"{ENGINE}.{key}": size for key, size in sizes.items()}


def engines_of_one_rank(config: MasterConfig) -> dict[str, object]:
    """Return the smallest sizes as values of keys, for searches of models: engines are chosen after them."""
    return _sizes(1, 1, 1) if config.policy.generation is not None else {}


def engine_choices(job: Job, config: MasterConfig, reserved: float) -> list[EngineChoice]:
    """Return the engines that fit, the fastest first. Among equally fast engines, those with fewer ranks come first.

    Engines over several machines are returned only if none fits on one, because their ranks exchange through a network.

    Args:
        config: the run, with the sizes of its models.
        reserved: bytes of a device that models and a weight sync need while engines hold their memory.
    """
    topology = plan_topology(config.policy_cluster, config.policy)
    ranks, machines = topology.generation_ranks_per_node, topology.generation_nodes
    sizes = [n for n in (1, 2, 4, 8, 16) if n <= ranks]
    on_one = [(tensor, stages) for tensor, stages in product(sizes, sizes) if ranks % (tensor * stages) == 0]
    on_several = [(ranks, stages) for stages in range(2, machines + 1) if machines % stages == 0]
    found: list[EngineChoice] = []
    for sizes_of_engines in (on_one, on_several):
        for tensor, stages in sizes_of_engines:
            engines = topology.generation_ranks // (tensor * stages)
            choice = _choice(job, config, (tensor, stages, engines), reserved)
            found += [choice] if choice is not None else []
        if found:
            break
    return sorted(found, key=lambda choice: (choice.seconds, choice.tensor * choice.stages))


def _choice(job: Job, config: MasterConfig, sizes: tuple[int, int, int], reserved: float) -> EngineChoice | None:
    """Return an engine of these sizes with its share of the memory, or None if it does not fit."""
    tensor, stages, engines = sizes
    experts = tensor if config.policy.sampling.engine.expert_parallel_size > 1 else 1
    changed = with_values(config, _sizes(tensor, stages, experts))
    generation = changed.policy.sampling
    try:
        check_engine_model(changed.policy, changed.cluster)
    except ConfigError:
        return None
    itemsize = torch_dtype(engine_precision(changed.policy)).itemsize
    quantization = weight_quantization(changed.policy, changed.cluster)
    memory = engine_memory(job.model, generation, itemsize, quantization)
    answers = ceil(samples_of_a_step(config) / engines)
    row, device = generation.engine.max_model_len * memory.cache_per_token, job.gpu.memory_gib * 2**30
    fixed = memory.weights + memory.workspace
    wanted = fixed + min(answers, MOST_RUNNING) * row
    most = min((USABLE_SHARE * device - reserved) / device, MOST_SHARE)
    steps = min(floor(most / STEP_OF_SHARE + _ROUNDING), ceil(wanted / device / STEP_OF_SHARE))
    share = round(steps * STEP_OF_SHARE, 2)
    room = floor((share * device - fixed) / row) if share > 0 else 0
    if room < 1:
        return None
    seconds = _seconds(job, memory, (tensor, stages), min(answers, room, MOST_RUNNING), answers)
    return EngineChoice(tensor, stages, experts, share, engines, answers, room, seconds)


def samples_of_a_step(config: MasterConfig) -> int:
    """Return the number of answers that are sampled for a step."""
    assert isinstance(config, RolloutMasterConfig), "the run samples"
    return config.algorithm.num_prompts_per_step * config.algorithm.num_generations_per_prompt


def _seconds(job: Job, memory: EngineMemory, sizes: tuple[int, int], running: int, answers: int) -> float:
    """Estimate the sampling of all answers of an engine, `running` at a time."""
    (tensor, stages), gpu = sizes, job.gpu
    length = job.section.sampling.engine.max_model_len
    read = memory.weights + running * length / 2 * memory.cache_per_token
    reading = read / (gpu.memory_gb_s * 1e9 * REACHED_MEMORY)
    computing = 2 * job.multiplied * running / (tensor * stages) / (gpu.tflops * 1e12 * REACHED)
    moved = 2 * 2 * (tensor - 1) / tensor * job.trace.hidden * 2 * running / (gpu.link_gb_s * 1e9 * REACHED_LINK)
    exchange = len(job.trace.layers) * (moved + 2 * EXCHANGE_S * (tensor > 1))
    return ceil(answers / running) * length * (max(reading, computing) * stages + exchange + STEP_S)


HEADROOM = 0.95
"""Share of the usable memory that a proposal may need, because measured predictions were up to 6 % too low."""
TIE = 0.02
"""Relative difference below which estimates count as equal."""


@dataclass(frozen=True)
class Fitting:
    """Candidate that is accepted."""

    candidate: Candidate
    seconds: Seconds
    """Estimated seconds of an update."""
    plan: MemoryPlan
    """Predicted memory of a rank."""


@dataclass(frozen=True)
class Rejected:
    """Candidate that is not accepted."""

    candidate: Candidate
    reason: str
    """Rule that the candidate breaks, or memory that it lacks, in one sentence."""
    needs: float = 0.0
    """Predicted bytes of a rank, or 0 if a rule decided."""


@dataclass
class Search:
    """Candidates of a job, the fastest first, and the results of their checks."""

    job: Job
    usable: float
    """Largest number of bytes of a device that the model may need."""
    _ranked: list[tuple[Candidate, Seconds]] = field(default_factory=list)
    _broken: dict[tuple[ParallelLayout, bool, int], str] = field(default_factory=dict)
    _judged: dict[Candidate, Fitting | Rejected] = field(default_factory=dict)
    _too_large: dict[tuple[ParallelLayout, str, bool], Rejected] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, headroom: float = HEADROOM) -> "Search":
        """Rank the candidates of a job by their estimates, with candidates that offload last.

        Estimates within `TIE` are equal: then less division of the model comes first, then larger microbatches.

        Raises:
            ConfigError: the model or its backend cannot be described.
        """
        job.require_description()
        ranked = [(candidate, update_seconds(job, candidate)) for candidate in candidates(job)]
        ranked.sort(key=lambda each: _place(*each))
        return cls(job, job.gpu.memory_gib * 2**30 * USABLE_SHARE * headroom, ranked)

    @property
    def ranked(self) -> Sequence[Candidate]:
        """All candidates, the fastest first."""
        return [candidate for candidate, _ in self._ranked]

    def fitting(self, skipped: Collection[tuple[ParallelLayout, bool]] = ()) -> Iterator[Fitting]:
        """Yield the candidates that are accepted, the fastest first.

        Args:
            skipped: layouts, each with or without offload, that are left out; the caller may add some meanwhile.
        """
        for candidate, seconds in self._ranked:
            if (candidate.layout, candidate.offload) in skipped:
                continue
            judged = self.judge(candidate, seconds)
            if isinstance(judged, Fitting):
                yield judged

    def judge(self, candidate: Candidate, seconds: Seconds | None = None) -> Fitting | Rejected:
        """Check a candidate and keep the result.

        If a microbatch does not fit, larger ones of the same layout are rejected without a check.
        """
        if candidate not in self._judged:
            self._judged[candidate] = self._judge(candidate, seconds or update_seconds(self.job, candidate))
        return self._judged[candidate]

    def closest(self) -> Rejected | None:
        """Return the rejected candidate that needs the least memory, or None if rules refuse all candidates."""
        least = [self.judge(candidate) for candidate in self._smallest()]
        without_room = [each for each in least if isinstance(each, Rejected) and each.needs]
        return min(without_room, key=lambda each: each.needs, default=None)

    def refusal(self) -> str:
        """Return a rule that refuses a candidate, for searches in which all are refused."""
        nothing = "no layout divides the ranks" if self.job.ranks > 0 else "other models and engines leave it no GPU"
        return next(filter(None, self._broken.values()), nothing)

    def has_room(self) -> bool:
        """Return whether a candidate that needs the least memory fits without offload."""
        return any(isinstance(self.judge(candidate), Fitting) for candidate in self._smallest())

    def _smallest(self) -> list[Candidate]:
        """Return the candidates with the smallest microbatch and full recomputation, without offload."""
        hows = {candidate.recompute for candidate in self.ranked}
        most = "full" if "full" in hows else "none"
        rows = min((candidate.rows for candidate in self.ranked), default=1)
        return [each for each in self.ranked if (each.rows, each.recompute, each.offload) == (rows, most, False)]

    def _judge(self, candidate: Candidate, seconds: Seconds) -> Fitting | Rejected:
        layout, section = candidate.layout, self.job.section
        packs = section.sequence_packing.enabled or section.dynamic_batching.enabled
        ruled = (layout, candidate.offload, 0 if packs else candidate.rows)  # all that rules depend on
        if ruled not in self._broken:
            self._broken[ruled] = self._broken_rule(candidate)
        if self._broken[ruled]:
            return Rejected(candidate, self._broken[ruled])
        kind = (layout, candidate.recompute, candidate.offload)
        known = self._too_large.get(kind)
        if known is not None and candidate.rows >= known.candidate.rows:
            return Rejected(candidate, known.reason, known.needs)
        changed = with_values(self.job.config, values_of(self.job, candidate))
        plan = self.job.plan(getattr(changed, self.job.name))
        if plan.peak <= self.usable:
            return Fitting(candidate, seconds, plan)
        self._too_large[kind] = Rejected(
            candidate,
            f"needs {plan.peak / 2**30:.1f} GiB of the {self.usable / 2**30:.1f} GiB that a proposal may use",
            plan.peak,
        )
        return self._too_large[kind]

    @cached_property
    def _of_others(self) -> frozenset[str]:
        """Findings of the rules before any size of this model changes, except findings about the model itself."""
        job = self.job
        if job.name == "policy":
            return frozenset()
        found = with_values(job.config, engines_of_one_rank(job.config)).findings()
        return frozenset(text for text in found if job.name not in text)

    def _broken_rule(self, candidate: Candidate) -> str:
        """Return the first rule that a layout breaks for any sizes of engines, or "" if it breaks none."""
        job = self.job
        changed = with_values(job.config, engines_of_one_rank(job.config) | values_of(job, candidate))
        found = next((text for text in changed.findings() if text not in self._of_others), None)
        if found is None:
            try:
                job.backend.check_sizes(getattr(changed, job.name), job.ranks, job.name)
            except ConfigError as error:
                found = str(error)
        lines = [line.strip() for line in (found or "").strip().splitlines()]
        return next((line for line in lines if not line.endswith("problems:")), found or "")  # not the head of a list


def _place(candidate: Candidate, seconds: Seconds) -> tuple[float, ...]:
    bucket = floor(log(seconds.total) / log(1 + TIE))
    return candidate.offload, bucket, candidate.divisions(), -candidate.rows, seconds.total
