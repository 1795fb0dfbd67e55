"""Check in the controller that a Hugging Face engine can compute the bits of the trainer (`policy.zero_mismatch`)."""

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.models.huggingface.recurrent import has_states
from nemo_rl.utils.errors import ConfigError


def check_model(policy: PolicyConfig, cluster: ClusterConfig) -> None:
    """Check that the engine can serve the model (`registry.EngineKind.check`)."""
    if policy.zero_mismatch and has_states(load_model_config(policy.model_name, policy.hf_config_overrides)):
        raise ConfigError(
            f"policy.zero_mismatch=true is for models whose tokens interact in attention only, and {policy.model_name} "
            "has layers with states. Set it to false."
        )
