"""Write a proposal: a table with reasons, overrides to paste, and a YAML file.

Invariant: the overrides and the file set the same keys, and both contain the overrides that the user gave.
"""

import os
import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.commands.dry_run import mesh_text
from nemo_rl.commands.size.candidates import Candidate, Seconds, update_seconds
from nemo_rl.commands.size.jobs import GpuKind
from nemo_rl.commands.size.proposal import Proposal
from nemo_rl.commands.size.search import EngineChoice, Fitting, Search
from nemo_rl.config import MasterConfig, RunConfig, load_config
from nemo_rl.config.loading.overrides import parse_override
from nemo_rl.utils.errors import ConfigError

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
    """Compare the estimate for a size with the estimates for half and double the size."""
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
    generation = proposal.config.policy.sampling
    length = generation.engine.max_model_len
    group = next(plan for plan in proposal.forecast.groups.values() if "generation" in plan.moments)
    held = {kind: size / 2**30 for kind, size in group.moments["generation"].items()}
    waves = -(-engine.answers // min(engine.answers, engine.room))
    rounds = f"{waves} rounds" if waves > 1 else "one round"
    yield Reason(
        "engines",
        f"{engine.engines} of {engine.tensor} x {engine.stages}",
        f"an engine has {engine.answers} answers to sample in a step and room for {engine.room} of {length} tokens "
        f"at a time, so it needs {rounds} of about {engine.seconds / waves:.3g} s; "
        f"each of its GPUs holds {held["engine's weights"]:.1f} GiB of weights",
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


def overrides_of(values: Mapping[str, Any]) -> list[str]:
    """Write values as overrides."""
    return [f"{key}={_text(value)}" for key, value in values.items()]


def changed_values(config: MasterConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a configuration does not have yet."""
    return {key: value for key, value in values.items() if _at(config, key) != value}


def proposal_lines(proposal: Proposal, gpu: GpuKind, own: str) -> Iterator[str]:
    """Yield the table.

    Args:
        proposal: the sizes.
        own: the estimate for the configuration's own sizes.
    """
    cluster = proposal.config.cluster
    yield "Machines"
    yield _line(
        "GPUs", f"{cluster.num_nodes} x {cluster.gpus_per_node} of {gpu.memory_gib:g} GiB, speeds of {gpu.name}"
    )
    yield ""
    yield "Proposal"
    for name, role in proposal.config.models.items():
        yield _line(name, mesh_text(role.section, proposal.searches[name].job.ranks) or "1 rank")
    for reason in reasons(proposal):
        yield _line(reason.what, f"{reason.value}: {reason.sentence}")
    sampling = f"{proposal.engine.seconds:.3g} s of sampling and " if proposal.engine else ""
    yield _line("a step", f"about {sampling}{proposal.train_seconds:.3g} s of training, all rows at maximum length")
    yield _line("own sizes", own)
    if proposal.headroom == 1.0:
        yield _line("note", "this needs all usable memory; predictions were up to 6 % too low where they were measured")


def command_lines(config: Path, overrides: Sequence[str]) -> Iterator[str]:
    """Yield the overrides, ready to paste after a script."""
    yield "Overrides"
    yield " \\\n".join([f"  --config {shlex.quote(str(config))}", *(f"  {shlex.quote(text)}" for text in overrides)])


def needed_overrides(
    config: MasterConfig, values: Mapping[str, Any], load: Callable[[Sequence[str]], MasterConfig]
) -> dict[str, Any]:
    """Return the values to write so that a configuration has all of them, also if keys depend on others.

    Args:
        values: the proposal.
    """
    needed = changed_values(config, values)
    while more := changed_values(load(overrides_of(needed)), values).keys() - needed.keys():
        needed = {key: value for key, value in values.items() if key in needed or key in more}
    return needed


def check_target(target: Path, given: Sequence[str]) -> None:
    """Check before a search that its result can be written.

    Raises:
        ConfigError: the file exists, its folder does not, or an override cannot be written as a key.
    """
    if target.exists():
        raise ConfigError(f"--write {target} exists already. Name a new file.")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"--write {target}: there is no folder {target.absolute().parent}. Make it first.")
    for text in given:
        if text.startswith("~"):
            raise ConfigError(f"--write cannot write the override {text!r}, which removes a key. Leave it out.")


def write_file(
    target: Path, config: Path, given: Sequence[str], values: Mapping[str, Any], schema: type[RunConfig]
) -> None:
    """Write a YAML file that inherits from a configuration.

    Args:
        target: the file, which must not exist.
        given: overrides of the user, written first.
        values: the proposal.
        schema: class of the configuration.

    Raises:
        ConfigError: the file exists, cannot be written, or does not load.
    """
    tree: dict[str, Any] = {"defaults": os.path.relpath(config.resolve(), target.resolve().parent)}
    for text in given:
        override = parse_override(text)
        _put(tree, override.key_or_group, override.value())
    for key, value in values.items():
        _put(tree, key, value)
    text = f"# Sizes proposed by `nemo_rl size`.\n{yaml.safe_dump(tree, sort_keys=False)}"
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--write {target} cannot be written ({error.strerror}). Name a new file.") from error
    try:
        load_config(target, schema=schema, check=False)
    except ConfigError as error:
        raise ConfigError(f"--write {target}: the file was written, but does not load. {error}") from error


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for name in sections:
        below = tree.get(name)
        if not isinstance(below, dict):
            below = tree[name] = {}
        tree = below
    tree[last] = value


def _at(config: MasterConfig, key: str) -> Any:
    place: Any = config
    for name in key.split("."):
        place = getattr(place, name)
    return place


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _line(name: str, text: str) -> str:
    return textwrap.fill(
        f"{name:<23} {text}", 118, initial_indent="  ", subsequent_indent=" " * 26, break_on_hyphens=False
    )
