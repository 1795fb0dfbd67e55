"""Check before workers start that a policy's experts can be reported and replayed."""

from nemo_rl.config import PolicyConfig
from nemo_rl.models.generation.registry import reports_experts
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.models.huggingface.sizes import expert_parameters_of
from nemo_rl.utils.errors import ConfigError


def check_router_replay(policy: PolicyConfig) -> None:
    """Refuse router replay for an engine that reports no experts, and for a model without experts.

    Args:
        policy: the section, with `generation`.

    Raises:
        ConfigError: the engine or the model cannot do it; nothing is checked unless the section asks for it.
    """
    if not policy.router_replay.enabled:
        return
    assert policy.generation is not None, "the caller has engines"
    backend = policy.generation.backend
    if not reports_experts(backend):
        raise ConfigError(
            f"policy.router_replay.enabled=true needs an engine that reports the experts of each token; "
            f"policy.generation.backend={backend} does not. Set policy.generation.backend=vllm (a class of your own "
            "has the attribute reports_experts=True), or policy.router_replay.enabled=false."
        )
    if not expert_parameters_of(load_model_config(policy.model_name, policy.hf_config_overrides)):
        raise ConfigError(
            f"policy.router_replay.enabled=true, but policy.model_name={policy.model_name!r} has no experts. Set "
            "policy.router_replay.enabled=false."
        )
