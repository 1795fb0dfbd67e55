"""Check models and environments of a run within seconds, before Ray starts.

`launch.checks` says when these checks run. Invariant: importing this module imports no large package.
"""

from collections.abc import Mapping
from typing import Any

from nemo_rl.config import (
    ClusterConfig,
    EvalMasterConfig,
    MasterConfig,
    Role,
    RolloutMasterConfig,
    RunConfig,
    check_second_models,
    model_ranks,
    report_findings,
)


def check_backends(models: Mapping[str, Role], cluster: ClusterConfig) -> None:
    """Check with each model's training backend that the model can be divided over its ranks.

    Args:
        models: The models of the run, including the policy.

    Raises:
        ConfigError: A model does not fit its mesh.
    """
    from nemo_rl.models.training.backends import training_backend

    for name, num_ranks in model_ranks(cluster, models).items():
        training_backend(models[name].section).check(models[name].section, num_ranks, name)


def check_added_models(config: MasterConfig, models: Mapping[str, Role]) -> None:
    """Check the models that a program added. Models of the configuration have already been checked.

    Raises:
        ConfigError: a key is wrong, or a model does not fit its mesh.
    """
    if models.keys() - config.models.keys():
        report_findings(check_second_models(models, config.model_cluster))
        check_backends(models, config.model_cluster)


def check_reachable_models(config: RunConfig) -> None:
    """Check that each model and tokenizer is a folder, or can be loaded from the hub or its cache."""
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
    """Import the environments that the data names, and check their sections. Tokenizer and data are not needed.

    Raises:
        ConfigError: an environment or a key of its section cannot be used.
    """
    from nemo_rl.environments.registry import check_environment

    sections = _environment_sections(config)
    for name in sorted({str(name) for _, name in config.env_entries()}):
        check_environment(name, sections.get(name) or {}, construct=name not in config.cluster.venvs)


def check_agent_endpoint(config: RunConfig) -> str:
    """Check that this machine can listen on the address that programs of agents use to call the model.

    Returns:
        A description of the result.

    Raises:
        ConfigError: this machine cannot listen there.
    """
    from nemo_rl.environments.registry import env_class_path
    from nemo_rl.environments.workers.loading import load_env_class
    from nemo_rl.utils.addresses import listener_of

    sections = _environment_sections(config)
    paths = {env_class_path(str(name), sections.get(str(name))) for _, name in config.env_entries()}
    endpoint = config.cluster.agent_endpoint
    if config.cluster.rollout_runners or not any(load_env_class(path)[0].runs_agents for path in paths):
        return "no program calls an endpoint on this machine"
    listener_of("cluster.agent_endpoint", endpoint.host, endpoint.port).close()
    return f"{endpoint.host} can be listened on"


def _environment_sections(config: RunConfig) -> Mapping[str, Any]:
    return config.env if isinstance(config, RolloutMasterConfig | EvalMasterConfig) else {}
