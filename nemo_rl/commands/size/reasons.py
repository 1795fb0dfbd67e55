"""Explain each size of a proposal in a sentence, with the estimates for the next smaller and the next larger size.

Invariant: every number comes from the search or from the forecast of memory, so a sentence cannot contradict them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from nemo_rl.commands.size.candidates import Candidate
from nemo_rl.commands.size.costs import Seconds, update_seconds
from nemo_rl.commands.size.engines import EngineChoice
from nemo_rl.commands.size.proposal import Proposal
from nemo_rl.commands.size.search import Fitting, Search

_MOST_CHECKED = 40
_PARTS = {
    "compute": "computation",
    "tensor": "tensor-parallel exchange",
    "context": "exchange of keys and values",
    "experts": "exchange of tokens between experts",
    "data": "exchange of gradients",
    "bubble": "waiting of stages",
    "offload": "host memory",
}
_AXES = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "pp": "pipeline stages",
    "ep": "expert parallel",
    "dp_replicate": "sharded replicas",
}


@dataclass(frozen=True)
class Reason:
    """One size and the reason for it."""

    what: str
    """Name of the size."""
    value: str
    sentence: str


def reasons(proposal: Proposal) -> Iterator[Reason]:
    """Yield a reason for each size of each model and of the engines."""
    for name, fitting in proposal.models.items():
        prefix = "" if len(proposal.models) == 1 else f"{name}: "
        yield from _of_model(prefix, proposal.searches[name], fitting)
    if proposal.engine is not None:
        yield from _of_engine(proposal, proposal.engine)


def _of_model(prefix: str, search: Search, fitting: Fitting) -> Iterator[Reason]:
    job, chosen = search.job, fitting.candidate
    for axis, title in _AXES.items():
        size = getattr(chosen.layout, axis)
        if (axis == "ep" and not job.num_experts) or (axis == "dp_replicate" and size == 1):
            continue

        def of_axis(candidate: Candidate, axis: str = axis) -> int:
            return int(getattr(candidate.layout, axis))

        yield Reason(f"{prefix}{title}", str(size), _compared(search, fitting, of_axis))
    yield Reason(f"{prefix}data parallel", str(chosen.layout.data_parallel_size), _data_sentence(search, chosen))
    rows = f"{chosen.rows} x {job.length} tokens"
    yield Reason(f"{prefix}microbatch", rows, _compared(search, fitting, lambda candidate: candidate.rows))
    if job.role.trains:
        yield Reason(f"{prefix}recomputation", chosen.recompute, _recompute_sentence(search, fitting))
        host = "on" if chosen.offload else "off"
        need = f"{fitting.plan.peak / 2**30:.1f} GiB of {search.usable / 2**30:.1f} GiB are needed at most"
        held = sum(fitting.plan.host.values()) * job.per_node / 2**30
        on_host = f"; the {job.per_node} ranks of a machine keep {held:.1f} GiB in host memory"
        yield Reason(f"{prefix}CPU offload", host, need + on_host if chosen.offload else f"{need} without it")


def _data_sentence(search: Search, chosen: Candidate) -> str:
    job, ranks = search.job, chosen.layout.data_parallel_size
    return (
        f"{job.ranks} ranks / {job.ranks // ranks} = {ranks}; {job.batch} rows / {ranks} = {job.batch / ranks:g} each"
    )


def _compared(search: Search, fitting: Fitting, size_of: Callable[[Candidate], int]) -> str:
    """Compare the estimate for a size with those for half and twice the size."""
    size, said = size_of(fitting.candidate), [f"an update takes about {_seconds(fitting.seconds)}"]
    for other in (size // 2, size * 2):
        if other:
            said.append(f"with {other} {_outcome(search, partial(_has_size, size_of, other))}")
    return "; ".join(said)


def _has_size(size_of: Callable[[Candidate], int], size: int, candidate: Candidate) -> bool:
    return size_of(candidate) == size


def _outcome(search: Search, wanted: Callable[[Candidate], bool]) -> str:
    """Return the estimate of the fastest candidate of a kind, or the reason why there is none."""
    matching = [candidate for candidate in search.ranked if wanted(candidate) and not candidate.offload]
    if not matching:
        return "no layout divides the ranks, the rows or the model"
    judged = [search.judge(candidate) for candidate in matching[:_MOST_CHECKED]]
    best = next((each for each in judged if isinstance(each, Fitting)), None)
    if best is not None:
        return f"{best.seconds.total:.3g} s"
    first = next(each for each in judged if not isinstance(each, Fitting))
    return f"the fastest {first.reason}" if first.needs else f"a rule refuses it ({first.reason})"


def _recompute_sentence(search: Search, fitting: Fitting) -> str:
    chosen = fitting.candidate
    said = []
    for how in dict.fromkeys(each.recompute for each in search.ranked):
        other = Candidate(chosen.layout, how, chosen.offload, chosen.rows)
        seconds, judged = update_seconds(search.job, other), search.judge(other)
        fits = f"{judged.plan.peak / 2**30:.1f} GiB" if isinstance(judged, Fitting) else judged.reason
        said.append(f"{how}: {seconds.total:.3g} s, {fits}")
    return "; ".join(said)


def _seconds(seconds: Seconds) -> str:
    parts = {name: each for name, each in vars(seconds).items() if each > 0.01 * seconds.total}
    told = ", ".join(f"{_PARTS[name]} {each:.3g}" for name, each in parts.items())
    return f"{seconds.total:.3g} s ({told})"


def _of_engine(proposal: Proposal, engine: EngineChoice) -> Iterator[Reason]:
    generation = proposal.config.policy.generation
    assert generation is not None, "the run samples"
    length = generation.engine.max_model_len
    group = next(plan for plan in proposal.forecast.groups.values() if "generation" in plan.moments)
    held = {kind: size / 2**30 for kind, size in group.moments["generation"].items()}
    waves = -(-engine.answers // min(engine.answers, engine.room))
    yield Reason(
        "engines",
        f"{engine.engines} of {engine.tensor} x {engine.stages}",
        f"weights take {held["engine's weights"]:.1f} GiB of a rank and leave a cache for {engine.room} answers of "
        f"{length} tokens; an engine samples {engine.answers} in a step, {waves} at most one after the other, in about "
        f"{engine.seconds:.3g} s",
    )
    others = sum(size for kind, size in held.items() if kind == "weights" or kind.endswith("s weights"))
    shares = generation.colocated.enabled
    next_to = f", next to {others - held["engine's weights"]:.1f} GiB of the models' weights" if shares else ""
    yield Reason(
        "engines' share",
        f"{engine.share:g}",
        f"{engine.share:g} x {proposal.config.cluster.gpu_memory_gb:g} GiB hold weights, "
        f"{held["engine's workspace"]:.1f} GiB of workspace and {held['key-value cache']:.1f} GiB of cache{next_to}",
    )
