"""Check a configuration, mostly with the checks that the run itself makes at its start.

Invariant: the run refuses whatever fails here, with the same message; checks write no files.
"""

import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from nemo_rl.config import MasterConfig, check_device, count_gpus
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
    """Compare the requested GPUs with those of this machine."""
    config = request.config
    if request.joins_cluster:
        return skipped("the workers run on the cluster's nodes, see 'nodes for the run'")

    def look() -> str:
        check_device(config, count_gpus())
        ranks = config.cluster.policy_ranks_per_node
        return f"cluster.device={config.cluster.device}, {ranks} rank{'s' if ranks > 1 else ''} on each node"

    return as_the_run_says(look, f"Run on a machine with GPUs, or on the CPU with --config {config.cpu_config}.")


def check_model(request: RunRequest) -> Finding:
    """Find models and tokenizers in a folder, in the hub's cache, or on the hub."""
    from nemo_rl.algorithms.setup.preflight import check_reachable_models

    def look() -> str:
        check_reachable_models(request.config)
        config = request.config
        return ", ".join(dict.fromkeys(model.model_name for model in models_of(config)))

    return as_the_run_says(look, "Correct the name; without a network fill the hub's cache (HF_HOME) or use a folder.")


def check_mesh(request: RunRequest) -> Finding:
    """Check that each backend can shard its model over its ranks, and that the engine supports the model."""
    from nemo_rl.algorithms.setup.preflight import check_backends
    from nemo_rl.models.generation.factory import check_engine_model

    def look() -> str:
        config = request.config
        if config.models:
            check_backends(config.models, config.cluster)
        check_engine_model(config.policy, config.cluster)
        return "the model fits its ranks and engines"

    return as_the_run_says(look, "Change the keys that the message names.")


def check_data(request: RunRequest) -> Finding:
    """Load tokenizer and data as the run does, and render the first rows."""
    config = request.config

    def look() -> str:
        if isinstance(config, MasterConfig):
            data = recipe_of(config).data
            return f"{len(data.train)} rows to train, {len(data.validation or ())} to validate"
        from nemo_rl.data.tokenizer import get_tokenizer
        from nemo_rl.evals.datasets import load_eval_dataset

        get_tokenizer(config.policy.tokenizer)
        return f"{len(load_eval_dataset(config['data']).raw.dataset)} problems"

    return as_the_run_says(look, "Correct data.* or policy.tokenizer.*; see the guide of the algorithm.")


def check_rewards(request: RunRequest) -> Finding:
    """Import the environments that the data uses."""
    from nemo_rl.algorithms.setup.preflight import check_environments

    config = request.config
    if not config.samples:
        return skipped("nothing is sampled")

    def look() -> str:
        check_environments(config)
        return ", ".join(sorted(config["env"])) or "none"

    return as_the_run_says(look)


def check_logging(request: RunRequest) -> Finding:
    """Check that the trackers are available and the log folder can be written."""
    config = request.config
    if not isinstance(config, MasterConfig):
        return skipped(_EVALUATION)

    def look() -> str:
        check_trackers(config.logger)
        return f"logs go to {_writable(Path(config.logger.log_dir), 'logger.log_dir')}"

    return as_the_run_says(look)


def check_memory(request: RunRequest) -> Finding:
    """Predict the memory of each model's ranks and compare it with the GPUs or machines.

    A failure means that the run would refuse to start. A configuration that probably does not fit is only a warning.
    """
    from nemo_rl.algorithms.setup.memory_check import compare_memory, memory_plans

    config = request.config
    if not isinstance(config, MasterConfig):
        return skipped(_EVALUATION)
    per_node = config.cluster.policy_ranks_per_node
    host = request.host_bytes and request.host_bytes / per_node
    described = config.cluster.gpu_memory_gb and config.cluster.gpu_memory_gb * 2**30
    available = described or request.gpu_bytes if config.cluster.uses_gpu else host
    lines, tables = [], []

    def look() -> str:
        if config.cluster.uses_gpu and described and request.gpu_bytes and described > request.gpu_bytes:
            logger.warning(
                "cluster.gpu_memory_gb=%g describes larger GPUs than this machine has (%s); remove the key to compare "
                "with these.",
                config.cluster.gpu_memory_gb,
                _gib(request.gpu_bytes),
            )
        with warnings_of_library():  # the data check repeats the tokenizer's warnings
            roles = roles_of(config)
        for name, section, num_ranks, plan in memory_plans(config.cluster, roles):
            if plan is None:
                lines.append(f"{name}: its backend does not predict memory")
                continue
            tables.append(plan.table(f"Predicted memory of {name} ({num_ranks} ranks)"))
            lines.append(f"{name}: {_gib(plan.peak)} at most on each of {num_ranks} ranks")
            compare_memory(name, section, plan, available)
        if config.cluster.uses_gpu and available is not None:
            _warn_of_shortfalls(config, available, host)
        return f"{'; '.join(lines)}; there are {_gib(available) if available else 'unknown'} for a rank"

    finding = as_the_run_says(look, "Change the keys that the message names; the table shows the largest parts.")
    numbers = {"bytes_for_a_rank": available} if available else {}
    return Finding(finding.status, finding.found, finding.advice, "\n".join(tables), numbers)


def _warn_of_shortfalls(config: MasterConfig, device: float, host: float | None) -> None:
    """Log shortfalls that a dry run would refuse, and host memory of models and engines beyond a GPU's share."""
    from nemo_rl.algorithms.setup.memory_forecast import forecast_memory

    forecast = forecast_memory(config, device)
    for problem in forecast.shortfalls:
        logger.warning("%s", problem)
    kept = {group: sum(plan.host.values()) for group, plan in forecast.groups.items()}
    group = max(kept, key=lambda name: kept[name])
    if host is not None and kept[group] > host:
        logger.warning(
            "%s keeps %s per GPU in host memory, but a GPU's share of the machine's is %s. To keep less, train "
            "without a reference (loss_fn.reference_policy_kl_penalty=0) or cpu_offload, or use more machines.",
            group,
            _gib(kept[group]),
            _gib(host),
        )


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"


def check_checkpoints(request: RunRequest) -> Finding:
    """Compare the free space of the checkpoint folder with the size that the training backend expects."""
    from nemo_rl.algorithms.setup.checkpoint_size import require_space
    from nemo_rl.models.training.backends import training_backend

    config = request.config
    if not isinstance(config, MasterConfig) or not config.checkpointing.enabled:
        return skipped("no checkpoints are written")

    def look() -> str:
        folder = _writable(Path(config.checkpointing.checkpoint_dir), "checkpointing.checkpoint_dir")
        one = training_backend(config.policy).checkpoint_bytes(config.policy, config.checkpointing)
        found = f"{readable_bytes(free_bytes(folder))} free in {folder}"
        if one is None:
            return f"{found}; a checkpoint's size is unknown until the weights are downloaded"
        require_space(config.checkpointing, one, len(list(folder.glob("step_*"))))
        return f"{found}, a checkpoint takes about {readable_bytes(one)}"

    return as_the_run_says(look, "Free space, or set checkpointing.checkpoint_dir to a larger disk.")


def _writable(folder: Path, key: str) -> Path:
    """Return the absolute folder if this user may create it or write into it."""
    folder = folder.absolute()
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ConfigError(f"{key}={str(folder)!r}: {nearest} cannot be written by this user. Choose another folder.")
    return folder


def check_size(request: RunRequest) -> Finding:
    """Compare the joined cluster's nodes with the configuration."""
    if not request.joins_cluster:
        return skipped("the run starts its own Ray on this machine")
    from nemo_rl.doctor import cluster

    return cluster.check_size(request.config)


def check_dummy_step(request: RunRequest) -> Finding:
    """Start the policy's workers and run one update at the longest length."""
    if not request.dummy_step:
        return skipped("needs --dummy-step, because it starts the workers")
    config = request.config
    if not isinstance(config, MasterConfig):
        return skipped(_EVALUATION)
    return as_the_run_says(
        partial(dummy_step.make_step, config), "The run's own steps would fail too; see docs/guides/troubleshooting.md."
    )


def run_checks(request: RunRequest) -> Sequence[Check[RunRequest]]:
    """Return the checks of a configuration, cheapest first."""
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
