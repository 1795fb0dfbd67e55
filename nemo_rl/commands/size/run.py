"""Run `nemo_rl size`: search sizes, print the proposal, write it, and check it with a dry run."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.setup.memory_forecast import device_bytes, forecast_memory
from nemo_rl.commands.dry_run import NOT_FITTING, describe
from nemo_rl.commands.size import proposal, report
from nemo_rl.commands.size.candidates import candidate_of, update_seconds
from nemo_rl.commands.size.jobs import GpuKind, Job, chosen_gpu, memory_of, with_values
from nemo_rl.commands.size.proposal import Proposal, described, updates_of_a_step
from nemo_rl.commands.size.search import HEADROOM, Search
from nemo_rl.config import MasterConfig, load_config, report_findings
from nemo_rl.config.base.paths import find_path
from nemo_rl.config.loading.algorithms import ALGORITHMS, algorithm_of
from nemo_rl.config.rules.models import trust_models
from nemo_rl.launch.checks import logs_of_library
from nemo_rl.utils.errors import ConfigError, did_you_mean


def size_run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status.

    Raises:
        ConfigError: the command line or the configuration is wrong.
    """
    config, schema = _read(arguments)
    gpu = _gpu(arguments, config)
    local = described(config, gpu)
    refused: list[str] = []
    with logs_of_library():
        found = proposal.placed(arguments.engines, local, gpu, refused)
        if found is None:
            lines = shortage_lines(arguments.engines, local, gpu, refused)
            sys.stdout.write("\n".join(["Nothing fits", *lines, ""]))
            return NOT_FITTING
        lines = [*report.proposal_lines(found, gpu, own_sizes(local, gpu)), ""]
        values = _written_values(arguments, config, schema, found)
        overrides = [*arguments.overrides, *report.overrides_of(values)]
        lines += [*report.command_lines(arguments.config, overrides), ""]
        checked = describe(load_config(arguments.config, overrides, schema=schema))
    lines += ["Dry run", *(f"  {line}" for line in checked.text.partition("Verdict\n")[2].splitlines())]
    sys.stdout.write("\n".join([*lines, ""]))
    if arguments.write is not None:
        file = Path(str(find_path(arguments.config)))
        report.write_file(arguments.write, file, arguments.overrides, values, schema)
        sys.stdout.write(f"  wrote {arguments.write}\n")
    return NOT_FITTING if checked.forecast.shortfalls else 0


def _written_values(
    arguments: argparse.Namespace, config: MasterConfig, schema: type[Any], found: Proposal
) -> dict[str, Any]:
    """Return the values of a proposal to write, with the memory of a GPU only if the command line names it."""
    named = arguments.gpu is not None or arguments.gpu_memory is not None
    proposed = {key: value for key, value in found.values.items() if named or key != "cluster.gpu_memory_gb"}

    def load(overrides: Sequence[str]) -> MasterConfig:
        changed: MasterConfig = load_config(
            arguments.config, [*arguments.overrides, *overrides], schema=schema, check=False
        )
        return changed

    return report.needed_overrides(config, proposed, load)


def _read(arguments: argparse.Namespace) -> tuple[MasterConfig, type[Any]]:
    name = arguments.algorithm or algorithm_of(arguments.config)
    trained = [each for each in ALGORITHMS if each != "eval"]
    if name not in trained:
        reason = "an evaluation trains nothing" if name == "eval" else f"unknown.{did_you_mean(name, trained)}"
        raise ConfigError(f"the algorithm {name} cannot be sized: {reason}. There are {', '.join(trained)}.")
    schema: type[Any] = ALGORITHMS[name]
    if arguments.write is not None:
        report.check_target(arguments.write, arguments.overrides)
    config = load_config(arguments.config, arguments.overrides, schema=schema, check=False)
    report_findings(config.missing_files())
    trust_models(config.model_keys())
    return config, schema


def _gpu(arguments: argparse.Namespace, config: MasterConfig) -> GpuKind:
    """Return the GPU of the options, else of the configuration or this machine, or else one of 80 GiB."""
    memory = memory_of(arguments.gpu_memory) if arguments.gpu_memory else None
    if memory is None and arguments.gpu is None and config.cluster.uses_gpu:
        memory = device_bytes(config.cluster) / 2**30
    return chosen_gpu(arguments.gpu, memory)


def own_sizes(local: MasterConfig, gpu: GpuKind) -> str:
    """Return the estimate for the configuration's own sizes, or the reason why they cannot be used."""
    broken = next(iter(local.findings()), None)
    if broken is not None:
        return f"the configuration's own sizes break a rule: {broken.strip().splitlines()[0]}"
    short = forecast_memory(local, gpu.memory_gib * 2**30).shortfalls
    if short:
        return f"the configuration's own sizes do not fit: {short[0]}"
    seconds = own_train_seconds(local, gpu)
    return f"the configuration's own sizes fit; about {seconds:.3g} s of training"


def own_train_seconds(local: MasterConfig, gpu: GpuKind) -> float:
    """Return the estimate for all models of a step with the configuration's own sizes."""
    jobs = [Job(local, name, gpu) for name in local.models]
    return sum(update_seconds(job, candidate_of(job)).total for job in jobs) * updates_of_a_step(local)


def shortage_lines(engines: str, local: MasterConfig, gpu: GpuKind, refused: Sequence[str]) -> list[str]:
    """Yield lines about the missing memory, and the number of GPUs that would be enough.

    Args:
        engines: value of `--engines`. If it allows several divisions, the first one leaves the policy most devices.
        local: the run, as `described` returns it.
        refused: errors of backends that refused sizes which fit.
    """
    placed = with_values(local, proposal.placements(engines, local)[0])
    lines = [line for name in placed.models if (line := _shortage(Job(placed, name, gpu)))]
    if refused and not lines:
        lines.append(f"  the models fit, but a backend refuses them: {refused[0]}")
    elif not lines:
        others = "engine" if placed.policy.generation is not None else "other model"
        lines.append(f"  the models fit alone, but no {others} fits next to them")
    found = proposal.smallest_cluster(engines, local, gpu)
    enough = "no cluster of up to 64 machines" if found is None else f"cluster.num_nodes={found[0]}"
    enough += "" if found is None else f" cluster.gpus_per_node={found[1]}, {found[0] * found[1]} GPUs,"
    return [*lines, f"  {enough} of {gpu.memory_gib:g} GiB would be enough (with {HEADROOM:.0%} of the usable memory)"]


def _shortage(job: Job) -> str:
    """Return the missing memory of a model on its ranks, or an empty text if the model fits alone."""
    search = Search.of(job, 1.0)
    closest = search.closest()
    if search.has_room():
        return ""
    if closest is None:
        refused = f"every layout of {job.ranks} ranks is refused, for example: " if search.ranked else ""
        return f"  {job.name}: {refused}{search.refusal()}"
    more = (closest.needs - search.usable) / 2**30
    return (
        f"  {job.name}: the smallest layout ({_sizes(vars(closest.candidate.layout))}) needs "
        f"{closest.needs / 2**30:.1f} GiB of each GPU, {more:.1f} GiB more than the "
        f"{search.usable / 2**30:.1f} GiB that are usable"
    )


def _sizes(axes: Mapping[str, Any]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in axes.items() if isinstance(size, int) and size > 1) or "1 rank"
