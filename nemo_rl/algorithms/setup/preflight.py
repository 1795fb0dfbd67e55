"""Check within seconds, before Ray starts, that this machine has what a configuration needs.

The checks run after the keys are accepted, the cheapest first. Checks that need transformers (tokenizers, data) follow
in `recipe` of each algorithm. Invariant: nothing is imported here that a run does not need.
"""

from collections.abc import Mapping

from nemo_rl.algorithms.setup.packages import check_packages
from nemo_rl.config import (
    ClusterConfig,
    MasterConfig,
    Role,
    RolloutMasterConfig,
    RunConfig,
    check_device,
    check_second_models,
    count_gpus,
    model_ranks,
    report_findings,
)
from nemo_rl.config.rules.trackers import check_trackers
from nemo_rl.distributed.cluster.address import require_cluster
from nemo_rl.distributed.cluster.start_checks import require_startable_ray
from nemo_rl.utils.cluster_address import cluster_address
from nemo_rl.utils.logger import make_log_dir
from nemo_rl.utils.named_parts import check_own_keys


def check_host(config: RunConfig) -> None:
    """Refuse a configuration that cannot run here; import nothing large.

    Raises:
        ConfigError: GPUs, Ray, a package, a tracker, the log folder or a model is missing.
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


def check_models(config: RunConfig) -> None:
    """Refuse a configuration that no machine can run; look at models and environments only.

    Raises:
        ConfigError: an optimizer, a schedule or an environment cannot be imported, or a model does not fit its mesh.
    """
    if config.samples:
        check_environments(config)
    if config.models:
        check_backends(config.models, config.cluster)


def check_backends(models: Mapping[str, Role], cluster: ClusterConfig) -> None:
    """Check with each model's backend that the model can be divided over its ranks.

    Args:
        models: the models of the run, the policy among them.
        cluster: the machines.

    Raises:
        ConfigError: a model does not fit its mesh.
    """
    from nemo_rl.models.training.backends import training_backend

    for name, num_ranks in model_ranks(cluster, models).items():
        training_backend(models[name].section).check(models[name].section, num_ranks, name)


def check_added_models(config: MasterConfig, models: Mapping[str, Role]) -> None:
    """Check the models that a program added to those of its configuration, as `check_host` and `check_models` do.

    Raises:
        ConfigError: a key is wrong, or a model does not fit its mesh.
    """
    if models.keys() - config.models.keys():
        report_findings(check_second_models(models, config.cluster))
        check_backends(models, config.cluster)


def check_reachable_models(config: RunConfig) -> None:
    """Check that models and tokenizers are folders or can be loaded from the hub or its cache."""
    from nemo_rl.models.huggingface.reachable import TOKENIZER_FILE, check_reachable

    seen = set()
    for model_key, tokenizer_key, model in config.model_keys():
        if model.model_name not in seen:
            check_reachable(model_key, model.model_name)
        seen.add(model.model_name)
        if model.tokenizer.name not in seen:
            check_reachable(tokenizer_key, model.tokenizer.name, TOKENIZER_FILE)
        seen.add(model.tokenizer.name)


def check_environments(config: RunConfig) -> None:
    """Import the environments that the data names."""
    from nemo_rl.environments.loading import load_env_class
    from nemo_rl.environments.registry import env_class_path

    for name in sorted({str(name) for _, name in config.env_entries()}):
        env_class, _ = load_env_class(env_class_path(name))
        if isinstance(config, RolloutMasterConfig):
            check_own_keys(env_class, f"env.{name}", config.env.get(name) or {})
