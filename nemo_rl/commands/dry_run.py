"""Describe a run without starting it: layout, arithmetic of a step, memory by phase, checkpoint, and whether it fits.

This is `--dry-run` of every example script (`command_line`). It makes the checks of `launch.checks` that read neither
tokenizers nor data, and the check of data that is in local files; findings about this machine are shown, but do not
change the exit status. Invariant: nothing is started, written or downloaded. Of a model only its `config.json` and
tokenizer are read, from its folder, the hub's cache, or `models/capacity/hub_configs`.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from nemo_rl.algorithms.setup.memory_forecast import (
    USABLE_SHARE,
    MemoryForecast,
    device_bytes,
    forecast_memory,
    rows_per_sample,
)
from nemo_rl.algorithms.setup.run_folders import checkpoint_sizes, checkpoints_at_once
from nemo_rl.config import (
    ClusterConfig,
    DatasetConfig,
    EngineConfig,
    EvalDataConfig,
    EvalMasterConfig,
    MasterConfig,
    PolicyConfig,
    Role,
    RolloutMasterConfig,
    RunConfig,
    SupervisedMasterConfig,
    Topology,
    divide_cluster,
    model_ranks,
    plan_topology,
)
from nemo_rl.config.base.names import EPISODES, GENERATED_DATASETS, SHAPES
from nemo_rl.config.rules.engines import ranks_of_engine, replicas_of_engine
from nemo_rl.distributed.parallel_layout import AXES, ParallelLayout
from nemo_rl.files.hub_download import cached_file
from nemo_rl.host.capacity import readable_bytes
from nemo_rl.launch.checks import CHECKS, Request, RunCheck, check_data
from nemo_rl.models.capacity.hub_configs import with_local_configs
from nemo_rl.models.huggingface.reachable import TOKENIZER_FILE
from nemo_rl.utils.errors import NemoRLError

NOT_FITTING = 1
"""Exit status of a dry run whose numbers do not fit."""


@dataclass(frozen=True)
class Description:
    """Description of a run."""

    text: str
    """The printed text."""
    forecast: MemoryForecast
    """Predicted memory of the run, and the parts that do not fit."""
    checkpoint: int | None
    """Size of one checkpoint in bytes, or None if none is written or a backend does not estimate it."""


def dry_run(config: RunConfig) -> int:
    """Print the description of a run, and the findings of a run on this machine.

    Args:
        config: a configuration as `load_config` returns it.

    Returns:
        The exit status: 0 if the run fits, or else `NOT_FITTING`.

    Raises:
        ConfigError: a model's configuration cannot be read here, or a check that does not depend on the machine fails.
        DataError: rows of local files cannot be used.
    """
    description = describe(config)
    here = "\n".join(["This machine (not part of the verdict)", *machine_lines(config)])
    sys.stdout.write(f"{description.text}\n{here}\n")
    return NOT_FITTING if description.forecast.shortfalls else 0


def describe(config: RunConfig) -> Description:
    """Return the text that `dry_run` prints and the numbers in it, with the same arguments and errors."""
    local = with_local_configs(config)
    checks = [_line(check.name, check.look(Request(local)).found) for check in CHECKS if _is_made(check, local)]
    checks += data_lines(local)
    device = device_bytes(config.cluster)
    forecast = forecast_memory(local, device)
    sizes = None
    if isinstance(local, MasterConfig) and local.checkpointing.enabled:
        sizes = checkpoint_sizes(local.models, local.checkpointing)
    parts = {
        "Layout": layout_lines(config, device),
        "One training step": step_lines(config) if isinstance(config, MasterConfig) else (),
        "Memory": memory_lines(config.policy, forecast),
        "Checkpoint": checkpoint_lines(config, sizes) if isinstance(config, MasterConfig) and sizes else (),
        "Checks": checks,
        "Verdict": result_lines(config.cluster, device, forecast),
    }
    texts = ["\n".join([title, *lines]) for title, found in parts.items() if (lines := list(found))]
    return Description("\n\n".join(texts) + "\n", forecast, sum(sizes.values()) if sizes else None)


def _is_made(check: RunCheck, config: RunConfig, of_machine: bool = False) -> bool:
    """Return whether a dry run makes a check."""
    return check.of_machine == of_machine and not check.reads_data and not check.skipped(config)


def data_lines(config: RunConfig) -> Iterator[str]:
    """Yield the finding about the data if it has local files, or else the files that have to be downloaded.

    Args:
        config: a configuration whose models are folders or in the hub's cache. The names of its tokenizers are changed.

    Raises:
        ConfigError, DataError: the data cannot be used.
    """
    entries = _data_entries(config)
    if not any(_has_files(entry) for entry in entries):
        return
    generated = (*GENERATED_DATASETS, EPISODES, SHAPES)
    missing = [
        str(entry.data_path or entry.dataset_name)
        for entry in entries
        if not _has_files(entry) and entry.dataset_name not in generated
    ]
    for _, _, model in config.model_keys():
        name = model.tokenizer.name
        if not Path(name).is_dir() and (file := cached_file(name, TOKENIZER_FILE)) is not None:
            model.tokenizer.name = str(file.parent)  # whose files are read without a request to the hub
    missing += [model.tokenizer.name for *_, model in config.model_keys() if not Path(model.tokenizer.name).is_dir()]
    if missing:
        yield _line("data", f"not read, because {missing[0]} is not on this machine")
    else:
        yield _line("data", check_data(Request(config)).found)


def _data_entries(config: RunConfig) -> list[DatasetConfig | EvalDataConfig]:
    if isinstance(config, EvalMasterConfig):
        return [config.data]
    assert isinstance(config, RolloutMasterConfig | SupervisedMasterConfig), "a run trains or evaluates"
    return [*config.data.train_entries, *config.data.validation_entries]


def _has_files(entry: DatasetConfig | EvalDataConfig) -> bool:
    """Return whether the rows of a data set are in files of this machine."""
    if entry.data_path is not None:
        return Path(entry.data_path).exists()
    return entry.get("data_files") is not None or Path(str(entry.dataset_name)).is_file()


def machine_lines(config: RunConfig) -> Iterator[str]:
    """Yield the findings of each check of this machine, without checks that need a failed one."""
    failed: set[str] = set()
    for check in CHECKS:
        if not _is_made(check, config, of_machine=True) or failed & set(check.needs):
            continue
        try:
            found = check.look(Request(config)).found
        except NemoRLError as error:
            failed.add(check.name)
            found = f"a run here would be refused: {error}"
        yield _line(check.name, found)


def layout_lines(config: RunConfig, device: float) -> Iterator[str]:
    """Yield the lines about nodes, ranks, axes and engines."""
    cluster, policy = config.cluster, config.policy
    size = f"{device / 2**30:.3g} GiB"
    devices = f"{_count(cluster.gpus_per_node, 'GPU')} of {size}" if cluster.uses_gpu else f"CPUs, {size} for a rank"
    yield _line("cluster", f"{_count(cluster.num_nodes, 'node')} x {devices}")
    models = config.models
    parts = divide_cluster(config.model_cluster, models)
    topology = plan_topology(parts.get("policy", cluster), policy)
    for name in sorted(models, key=lambda name: name == "policy"):
        yield _line(name, _model_line(name, models, parts[name]))
    if policy.generation is not None:
        alone = not models or not policy.generation.colocated.enabled
        where = "" if alone else ", on the policy's devices in turns"
        yield _line("generation", f"{_engines_line(policy.generation.engine, topology)}{where}")


def _model_line(name: str, models: Mapping[str, Role], part: ClusterConfig) -> str:
    role = models[name]
    host = role.shares_with
    nodes, per_node = part.num_nodes, part.policy_ranks_per_node
    if host == "policy":
        topology = plan_topology(part, models["policy"].section)
        nodes, per_node = topology.policy_nodes, topology.policy_ranks_per_node
    ranks = _ranks_line(role.section, nodes, per_node)
    return ranks if host in (None, name) else f"{ranks}, on the {host}'s devices in turns"


def _ranks_line(model: PolicyConfig, nodes: int, per_node: int) -> str:
    mesh = mesh_text(model, nodes * per_node)
    placed = f"{_count(nodes * per_node, 'rank')} ({_count(nodes, 'node')} x {per_node})"
    return f"{model.model_name} by {model.backend_key}, {placed}{f': {mesh}' if mesh else ''}"


def mesh_text(model: PolicyConfig, ranks: int) -> str:
    """Return the axes of a model with more than one rank, and the number of those ranks that divide the experts."""
    layout = ParallelLayout.of(model, ranks)
    names = {"dp_shard": "fsdp" if model.backend_key == "dtensor_cfg" else "dp"}
    axes = zip(AXES, layout.shape, strict=True)
    sizes = " x ".join(f"{names.get(axis, axis)} {size}" for axis, size in axes if size > 1)
    return f"{sizes}, ep {layout.ep}" if layout.ep > 1 else sizes


def _engines_line(engine: EngineConfig, topology: Topology) -> str:
    size, per_node = ranks_of_engine(engine), topology.generation_ranks_per_node
    nodes, replicas = _count(topology.generation_nodes, "node"), replicas_of_engine(engine)
    return (
        f"{_count(topology.generation_ranks // size, 'engine')} of {_count(size, 'device')} (tensor "
        f"{engine.tensor_parallel_size} x pipeline {engine.pipeline_parallel_size}"
        f"{f' x data {replicas}' if replicas > 1 else ''}), "
        f"{f'each on {size // per_node}' if size > per_node else f'{per_node // size} on each'} of {nodes}"
    )


def _line(name: str, text: str) -> str:
    return f"  {f'{name} ':<14}{text}"


def step_lines(config: MasterConfig) -> Iterator[str]:
    """Yield the lines about samples, updates, microbatches and tokens of a step, with samples of the maximum length."""
    policy, length = config.policy, config.policy.max_total_sequence_length
    layout = ParallelLayout.of(policy, model_ranks(config.model_cluster, config.models)["policy"])
    rows_each = rows_per_sample(config)
    samples = policy.train_global_batch_size
    if isinstance(config, RolloutMasterConfig):
        algorithm = config.algorithm
        prompts, answers = algorithm.num_prompts_per_step, algorithm.num_generations_per_prompt
        samples = prompts * answers
        yield _line("samples", f"{prompts} prompts x {answers} answers = {samples}")
    updates = ceil(samples / policy.train_global_batch_size)
    kind = "samples" if rows_each == 1 else f"pairs ({rows_each} rows each)"
    yield _line("updates", f"{samples} {kind} / train_global_batch_size {policy.train_global_batch_size} = {updates}")
    rows = ceil(policy.train_global_batch_size * rows_each / layout.data_parallel_size)
    microbatches, how = _microbatches(policy, rows, rows_each)
    ranks = _count(layout.data_parallel_size, "data-parallel rank")
    yield _line("microbatches", f"{_count(rows, 'row')} for each of {ranks}, {how}: at most {microbatches} an update")
    tokens = samples * rows_each * length
    yield _line("tokens", f"at most {_count(samples * rows_each, 'row')} x {length} = {tokens:,} a step")


def _microbatches(policy: PolicyConfig, rows: int, rows_each: int) -> tuple[int, str]:
    """Return the largest number of microbatches of a rank's rows, and how they are formed."""
    length = policy.max_total_sequence_length
    for way, name in ((policy.sequence_packing, "packed into"), (policy.dynamic_batching, "batched up to")):
        if way.enabled:
            per_microbatch = max(way.train_mb_tokens // (length * rows_each), 1) * rows_each
            return ceil(rows / per_microbatch), f"{name} {way.train_mb_tokens} tokens"
    size = policy.train_micro_batch_size * rows_each
    return ceil(rows / size), f"{size} at a time"


def memory_lines(policy: PolicyConfig, forecast: MemoryForecast) -> Iterator[str]:
    """Yield a table for each group of devices, and the sizes of the engines' caches."""
    for group, plan in forecast.groups.items():
        yield plan.table(f"  {group}")
    if forecast.cache_tokens is not None and policy.generation is not None:
        tokens = max(forecast.cache_tokens, 0.0)
        answers = tokens / policy.generation.engine.max_model_len
        yield f"  key-value cache of an engine: {tokens:,.0f} tokens, {answers:.1f} answers of full length at once"


def checkpoint_lines(config: MasterConfig, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield the bytes of a checkpoint, by model where several are trained, and of all checkpoints that are kept."""
    if len(sizes) > 1:
        yield from (_line(name, readable_bytes(size)) for name, size in sizes.items())
    one, most = sum(sizes.values()), checkpoints_at_once(config.checkpointing)
    yield f"  {readable_bytes(one)} each, {readable_bytes(most * one)} for the {most} on the disk at once"


def result_lines(cluster: ClusterConfig, device: float, forecast: MemoryForecast) -> Iterator[str]:
    """Yield whether the run fits, and the memory that the devices are assumed to have."""
    if not forecast.groups:
        yield "  fits: no process of the run has a model"
        return
    against = f"{device / 2**30:.3g} GiB of each process"
    if cluster.uses_gpu:
        against = f"{USABLE_SHARE:.0%} of the {device / 2**30:.3g} GiB of each GPU"
        against += "" if cluster.gpu_memory_gb else " (describe others by cluster.gpu_memory_gb)"
    missing = " ".join(dict.fromkeys(plan.missing for plan in forecast.groups.values() if plan.missing))
    if not forecast.shortfalls:
        yield f"  fits {against}{f', as far as it is known. {missing}' if missing else ''}"
        return
    yield f"  does NOT fit {against}:"
    yield from (f"  - {problem}" for problem in forecast.shortfalls)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
