"""What this machine lacks for a configuration, found within seconds and before Ray starts.

Runs once the keys are accepted, cheapest question first; what takes transformers (tokenizers, data) follows in `recipe`
of each algorithm. Invariant: nothing is imported here that a run does not need.
"""

from collections.abc import Iterator

from nemo_rl.algorithms.setup.packages import check_packages
from nemo_rl.config import (
    EvalMasterConfig,
    MasterConfig,
    PolicyConfig,
    RolloutMasterConfig,
    check_device,
    count_gpus,
    model_ranks,
)
from nemo_rl.config.rules.trackers import check_trackers
from nemo_rl.distributed.cluster.address import require_cluster
from nemo_rl.distributed.cluster.start_checks import require_startable_ray
from nemo_rl.utils.cluster_address import cluster_address
from nemo_rl.utils.logger import make_log_dir
from nemo_rl.utils.named_parts import check_own_keys

SECTIONS = ("policy", "teacher")
"""Sections of the models of a run, in the order of `MasterConfig.models`."""


def check_host(config: MasterConfig | EvalMasterConfig) -> None:
    """Refuse a configuration that cannot run here; imports nothing large.

    Raises:
        ConfigError: GPUs, a Ray, packages, a tracker, the log folder or a model is not to be had.
    """
    check_device(config, count_gpus())
    check_packages(config)
    if cluster_address() is None:
        require_startable_ray()
    else:
        require_cluster()
    if isinstance(config, MasterConfig):
        check_trackers(config.logger)
        make_log_dir(config.logger.log_dir)
    check_reachable_models(config)


def check_models(config: MasterConfig | EvalMasterConfig) -> None:
    """Refuse what no machine can run, by asking models and environments alone.

    Raises:
        ConfigError: an optimizer, a schedule or an environment is not to be had, or a model does not fit its mesh.
    """
    if isinstance(config, RolloutMasterConfig | EvalMasterConfig):
        check_environments(config)
    if isinstance(config, MasterConfig):
        check_backends(config)


def check_backends(config: MasterConfig) -> None:
    """Ask each model's backend whether it can be spread over the ranks that it will get."""
    from nemo_rl.models.training.backends import training_backend

    sections = zip(SECTIONS, config.models, model_ranks(config.cluster, config.models), strict=False)
    for section, model, num_ranks in sections:
        training_backend(model).check(model, num_ranks, section)


def check_reachable_models(config: MasterConfig | EvalMasterConfig) -> None:
    """Look whether models and tokenizers can be had from here."""
    from nemo_rl.models.huggingface.reachable import TOKENIZER_FILE, check_reachable

    seen = set()
    for model_key, tokenizer_key, model in _models(config):
        if model.model_name not in seen:
            check_reachable(model_key, model.model_name)
        seen.add(model.model_name)
        if model.tokenizer.name not in seen:
            check_reachable(tokenizer_key, model.tokenizer.name, TOKENIZER_FILE)
        seen.add(model.tokenizer.name)


def _models(config: MasterConfig | EvalMasterConfig) -> Iterator[tuple[str, str, PolicyConfig]]:
    """Key of the model, key of its tokenizer, and the section."""
    if isinstance(config, EvalMasterConfig):
        yield "generation.model_name", "tokenizer.name", config.policy
        return
    for section, model in zip(SECTIONS, config.models, strict=False):
        yield f"{section}.model_name", f"{section}.tokenizer.name", model


def check_environments(config: RolloutMasterConfig | EvalMasterConfig) -> None:
    """Import the environments that the data asks for."""
    from nemo_rl.environments.loading import load_env_class
    from nemo_rl.environments.registry import env_class_path

    if isinstance(config, EvalMasterConfig):
        names = {config.data.env_name}
    else:
        names = {str(entry.env_name) for entry in (*config.data.train_entries, *config.data.validation_entries)}
    for name in sorted(names):
        env_class, _ = load_env_class(env_class_path(name))
        if isinstance(config, RolloutMasterConfig):
            check_own_keys(env_class, f"env.{name}", config.env.get(name) or {})
