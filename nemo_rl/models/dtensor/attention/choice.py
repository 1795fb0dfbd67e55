"""Choose the attention function from the policy section and from what the architecture supports."""

import logging

from transformers.modeling_utils import PreTrainedModel

from nemo_rl.config import PolicyConfig
from nemo_rl.models.dtensor.attention.function import VARLEN_ATTENTION, register_varlen_attention
from nemo_rl.models.dtensor.attention.probe import (
    Forward,
    logits,
    use_registered_attention,
    verify_shared_prompts,
)
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)


def attention_to_load(config: PolicyConfig) -> str | None:
    """Return the `attn_implementation` to load a model with; None lets the architecture choose.

    Packed rows need the registered attention. So do models that see only a part of each row, because transformers
    makes its masks from the tokens that the model sees.
    """
    registered = register_varlen_attention()  # always: one rank may choose it later, in `choose_attention`
    asked = config.dtensor_cfg
    partial_rows = asked.context_parallel_size > 1 or asked.sequence_parallel
    return registered if config.sequence_packing.enabled or partial_rows else None


def choose_attention(probe_model: PreTrainedModel, config: PolicyConfig, forward: Forward = logits) -> str:
    """Test which attention an architecture can use: the registered one if it does not change the outputs.

    Args:
        probe_model: an unsharded model of the architecture, with weights.
        config: the policy section.
        forward: returns the outputs to compare.

    Raises:
        ConfigError: the registered attention is needed, and the architecture's outputs differ with it.
    """
    asked = config.dtensor_cfg
    packed, divided = config.sequence_packing.enabled, asked.context_parallel_size > 1
    use_registered_attention(probe_model, packed=packed, divided=divided, forward=forward)
    chosen: str = probe_model.config._attn_implementation
    if asked.sequence_parallel and chosen != VARLEN_ATTENTION:
        raise ConfigError(
            f"{type(probe_model).__name__} masks its attention in its own way, which it cannot do from a part of each "
            "row. Set policy.dtensor_cfg.sequence_parallel=false for this model."
        )
    return chosen


def can_share_prompts(probe_model: PreTrainedModel, config: PolicyConfig, forward: Forward = logits) -> bool:
    """Return whether packed rows may hold one copy of the tokens that they begin with.

    False if that is not configured, or if context or pipeline parallelism divides the tokens or the model.

    Args:
        probe_model: the model, after `choose_attention`.
        config: the policy section.
        forward: returns the outputs to compare.
    """
    packing, section = config.sequence_packing, config.dtensor_cfg
    divided = section.context_parallel_size > 1 or section.pipeline_parallel_size > 1
    if divided or not (packing.enabled and packing.share_prompts):
        return False
    try:
        verify_shared_prompts(probe_model, forward)
    except ConfigError as error:
        logger.info("Prompts are not shared: %s", error)
        return False
    return True
