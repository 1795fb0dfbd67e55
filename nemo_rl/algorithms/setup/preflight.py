"""Check models and environments of a run within seconds, before Ray starts.

`launch.checks` says when these checks run. Invariant: importing this module imports no large package.
"""

from collections.abc import Mapping
from typing import Any

from nemo_rl.config import (
    ClusterConfig,
    EvalMasterConfig,
    MasterConfig,
    PolicyConfig,
    Role,
    RolloutMasterConfig,
    RunConfig,
    check_second_models,
    model_ranks,
    report_findings,
)
from nemo_rl.utils.errors import ConfigError


def check_backends(models: Mapping[str, Role], cluster: ClusterConfig) -> None:
    """Check the output head of each model, and with its training backend that it can be divided over its ranks.

    Args:
        models: The models of the run, including the policy.

    Raises:
        ConfigError: A model does not fit its mesh, or has the head for another purpose.
    """
    from nemo_rl.models.training.backends import training_backend

    for name, num_ranks in model_ranks(cluster, models).items():
        _check_head(models[name].section, name)
        training_backend(models[name].section).check(models[name].section, num_ranks, name)


def _check_head(section: PolicyConfig, name: str) -> None:
    """Check that a model with a trained head for scores has a head with that number of scores.

    Raises:
        ConfigError: The model has another number of scores, or is used as a language model.
    """
    from nemo_rl.models.huggingface.comparison import is_classifier
    from nemo_rl.models.huggingface.load import describe_scores, load_model_config

    model = load_model_config(section.model_name, section.hf_config_overrides, name)
    if section.reward_model_cfg.enabled:
        describe_scores(model, section.reward_model_cfg.attributes, name)
    elif is_classifier(model):
        raise ConfigError(
            f"{name}.model_name={section.model_name!r} is a sequence classifier (a reward model), which has scores in "
            f"place of next tokens. Name a language model in {name}.model_name."
        )


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
