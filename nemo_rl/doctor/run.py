"""The checks of a configuration; most of them are those that the run itself makes at its start.

Invariant: what is refused here is refused by the run, in the same words, and nothing is written.
"""

import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from nemo_rl.config import EvalMasterConfig, MasterConfig, RolloutMasterConfig, check_device, count_gpus
from nemo_rl.config.rules.trackers import check_trackers
from nemo_rl.doctor import dummy_step
from nemo_rl.doctor.algorithms import recipe_of, roles_of
from nemo_rl.doctor.checks import Check, Finding, skipped
from nemo_rl.doctor.requests import RunRequest, models_of
from nemo_rl.doctor.runner import as_the_run_says, warnings_of_library
from nemo_rl.host.disk_space import free_bytes, readable_bytes
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)

_EVALUATION = "an evaluation trains nothing"


def check_devices(request: RunRequest) -> Finding:
    """Compare the GPUs that are asked for with those of this machine."""
    config = request.config
    if request.joins_cluster:
        return skipped("the workers run on the cluster's nodes, see 'nodes for the run'")

    def look() -> str:
        check_device(config, count_gpus())
        ranks = config.cluster.policy_ranks_per_node
        return f"cluster.device={config.cluster.device}, {ranks} rank{'s' if ranks > 1 else ''} on each node"

    return as_the_run_says(look, f"Run on a machine with GPUs, or on the CPU with --config {config.cpu_config}.")


def check_model(request: RunRequest) -> Finding:
    """Look for models and tokenizers: a folder, the hub's cache, or the hub."""
    from nemo_rl.algorithms.setup.preflight import check_reachable_models

    def look() -> str:
        check_reachable_models(request.config)
        config = request.config
        models = [config.policy] if isinstance(config, EvalMasterConfig) else models_of(config)
        return ", ".join(dict.fromkeys(model.model_name for model in models))

    return as_the_run_says(
        look, "Correct the name; on a machine without network fill the hub's cache (HF_HOME) or give a folder."
    )


def check_mesh(request: RunRequest) -> Finding:
    """Ask each model's backend whether it can be spread over its ranks, and the engine whether it knows the model."""
    from nemo_rl.algorithms.setup.preflight import check_backends
    from nemo_rl.models.generation.factory import check_engine_model

    def look() -> str:
        config = request.config
        if isinstance(config, MasterConfig):
            check_backends(config.models, config.cluster)
        check_engine_model(config.policy, config.cluster)
        return "the model fits its ranks and engines"

    return as_the_run_says(look, "Change the keys that the message names.")


def check_data(request: RunRequest) -> Finding:
    """Load tokenizer and data as the run will, and render the first rows."""
    config = request.config

    def look() -> str:
        if isinstance(config, EvalMasterConfig):
            from nemo_rl.data.tokenizer import get_tokenizer
            from nemo_rl.evals.datasets import load_eval_dataset

            get_tokenizer(config.policy.tokenizer)
            return f"{len(load_eval_dataset(config.data).raw.dataset)} problems"
        data = recipe_of(config).data
        return f"{len(data.train)} rows to train, {len(data.validation or ())} to validate"

    return as_the_run_says(look, "Correct data.* or policy.tokenizer.*; see the guide of the algorithm.")


def check_rewards(request: RunRequest) -> Finding:
    """Import the environments that the data asks for."""
    from nemo_rl.algorithms.setup.preflight import check_environments

    config = request.config
    if not isinstance(config, RolloutMasterConfig | EvalMasterConfig):
        return skipped("nothing is sampled")

    def look() -> str:
        check_environments(config)
        return ", ".join(sorted(config.env)) or "none"

    return as_the_run_says(look)


def check_logging(request: RunRequest) -> Finding:
    """Look whether the trackers are there and the log folder can be written."""
    config = request.config
    if isinstance(config, EvalMasterConfig):
        return skipped(_EVALUATION)

    def look() -> str:
        check_trackers(config.logger)
        return f"logs go to {_writable(Path(config.logger.log_dir), 'logger.log_dir')}"

    return as_the_run_says(look)


def check_memory(request: RunRequest) -> Finding:
    """Predict the memory of each model's ranks and compare it with the GPUs, or the machines, that there are.

    A failure is what the run refuses, which is less than what cannot work; the rest of that is a warning.
    """
    from nemo_rl.algorithms.setup.memory_check import compare_memory, memory_plans

    config = request.config
    if isinstance(config, EvalMasterConfig):
        return skipped(_EVALUATION)
    per_node = config.cluster.policy_ranks_per_node
    host = request.host_bytes and request.host_bytes / per_node
    described = config.cluster.gpu_memory_gb and config.cluster.gpu_memory_gb * 2**30
    available = described or request.gpu_bytes if config.cluster.uses_gpu else host
    lines, tables = [], []

    def look() -> str:
        if config.cluster.uses_gpu and described and request.gpu_bytes and described > request.gpu_bytes:
            logger.warning(
                "cluster.gpu_memory_gb=%g describes larger GPUs than those that are here, which have %s; without it "
                "these are compared.",
                config.cluster.gpu_memory_gb,
                _gib(request.gpu_bytes),
            )
        with warnings_of_library():  # of the tokenizer, which the check of the data repeats
            roles = roles_of(config)
        for name, section, num_ranks, plan in memory_plans(config.cluster, roles):
            if plan is None:
                lines.append(f"{name}: its backend predicts nothing")
                continue
            tables.append(plan.table(f"Predicted memory of {name} ({num_ranks} ranks)"))
            lines.append(f"{name}: {_gib(plan.peak)} at the most on each of {num_ranks} ranks")
            compare_memory(name, section, plan, available)
        if config.cluster.uses_gpu and available is not None:
            _warn_of_shortfalls(config, available, host)
        return f"{'; '.join(lines)}; there are {_gib(available) if available else 'unknown'} for a rank"

    finding = as_the_run_says(look, "Change the keys that the message names; the table shows what takes most.")
    numbers = {"bytes_for_a_rank": available} if available else {}
    return Finding(finding.status, finding.found, finding.advice, "\n".join(tables), numbers)


def _warn_of_shortfalls(config: MasterConfig, device: float, host: float | None) -> None:
    """Log what a dry run would not let pass, and what models and engines keep in host memory beyond a GPU's share."""
    from nemo_rl.algorithms.setup.memory_forecast import forecast_memory

    forecast = forecast_memory(config, device)
    for problem in forecast.shortfalls:
        logger.warning("%s", problem)
    kept = {group: sum(plan.host.values()) for group, plan in forecast.groups.items()}
    group = max(kept, key=lambda name: kept[name])
    if host is not None and kept[group] > host:
        logger.warning(
            "%s keeps %s for each GPU in host memory, and a GPU's share of the machine is %s. Less is kept without a "
            "reference (loss_fn.reference_policy_kl_penalty=0), without cpu_offload, or with more machines.",
            group,
            _gib(kept[group]),
            _gib(host),
        )


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"


def check_checkpoints(request: RunRequest) -> Finding:
    """Hold the free space of the checkpoint folder against the size that the training backend expects."""
    from nemo_rl.algorithms.setup.checkpoint_size import require_space
    from nemo_rl.models.training.backends import training_backend

    config = request.config
    if isinstance(config, EvalMasterConfig) or not config.checkpointing.enabled:
        return skipped("no checkpoints are written")

    def look() -> str:
        folder = _writable(Path(config.checkpointing.checkpoint_dir), "checkpointing.checkpoint_dir")
        one = training_backend(config.policy).checkpoint_bytes(config.policy, config.checkpointing)
        found = f"{readable_bytes(free_bytes(folder))} free in {folder}"
        if one is None:
            return f"{found}; a checkpoint's size is unknown until the weights are here"
        require_space(config.checkpointing, one, len(list(folder.glob("step_*"))))
        return f"{found}, a checkpoint takes about {readable_bytes(one)}"

    return as_the_run_says(look, "Free space, or set checkpointing.checkpoint_dir to a larger disk.")


def _writable(folder: Path, key: str) -> Path:
    """The folder, absolute, if this user may make it or write into it."""
    folder = folder.absolute()
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ConfigError(f"{key}={str(folder)!r}: {nearest} cannot be written by this user. Choose another folder.")
    return folder


def check_size(request: RunRequest) -> Finding:
    """Compare the joined cluster's nodes with those that the configuration asks for."""
    if not request.joins_cluster:
        return skipped("the run starts a Ray of its own on this machine")
    from nemo_rl.doctor import cluster

    return cluster.check_size(request.config)


def check_dummy_step(request: RunRequest) -> Finding:
    """Start the policy's workers and make one update at the longest length."""
    if not request.dummy_step:
        return skipped("asked for by --dummy-step, because it starts the workers")
    config = request.config
    if isinstance(config, EvalMasterConfig):
        return skipped(_EVALUATION)
    return as_the_run_says(
        partial(dummy_step.make_step, config), "The step is one of the run's own; see docs/guides/troubleshooting.md."
    )


def run_checks(request: RunRequest) -> Sequence[Check[RunRequest]]:
    """The checks of a configuration, cheapest first."""
    timeouts = request.config.cluster.timeouts
    before_a_step = ("cluster", "devices", "model", "mesh", "memory", "ports")
    return [
        Check("devices", check_devices),
        Check("nodes for the run", check_size, needs=("cluster",)),
        Check("logs", check_logging),
        Check("environments", check_rewards, 60.0),
        Check("model", check_model, 60.0),
        Check("mesh", check_mesh, 120.0, needs=("model",)),
        Check("memory", check_memory, 300.0, needs=("model",)),
        Check("checkpoints", check_checkpoints, 60.0, needs=("model",)),
        Check("data", check_data, 600.0, needs=("model",)),
        Check(
            "dummy step",
            check_dummy_step,
            timeouts.setup_s + timeouts.train_s + timeouts.shutdown_s,
            needs=before_a_step if request.dummy_step else (),
        ),
    ]
