"""Check that Megatron Core can express a model, in the controller, which imports nothing of Megatron Core."""

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.models.megatron.model_check import check_expressible
from nemo_rl.utils.errors import ConfigError


def check_model(policy: PolicyConfig, cluster: ClusterConfig) -> None:
    """See `registry.EngineKind.check`."""
    key = "policy.generation.backend=megatron"
    model = load_model_config(policy.model_name, policy.hf_config_overrides)
    try:
        check_expressible(model)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error} The engines vllm and hf need no Megatron Core.") from error
