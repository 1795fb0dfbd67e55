"""Which attention a policy section needs, and which one its architecture takes."""

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
    """The `attn_implementation` to load a model with; None lets the architecture choose.

    Packed rows need the registered one, and so do models that see a part of each row: transformers makes its masks
    from what the model sees.
    """
    registered = register_varlen_attention()  # also where one rank finds out later that the architecture takes it
    asked = config.dtensor_cfg
    partial_rows = asked.context_parallel_size > 1 or asked.sequence_parallel
    return registered if config.sequence_packing.enabled or partial_rows else None


def choose_attention(twin: PreTrainedModel, config: PolicyConfig, forward: Forward = logits) -> str:
    """Find out which attention an architecture takes: the registered one where it changes nothing.

    Args:
        twin: a model of the architecture with weights, unsharded.
        config: the policy section.
        forward: what is compared.

    Raises:
        ConfigError: the registered one is needed, and the architecture does not compute the same with it.
    """
    asked = config.dtensor_cfg
    packed, divided = config.sequence_packing.enabled, asked.context_parallel_size > 1
    use_registered_attention(twin, packed=packed, divided=divided, forward=forward)
    chosen: str = twin.config._attn_implementation
    if asked.sequence_parallel and chosen != VARLEN_ATTENTION:
        raise ConfigError(
            f"{type(twin).__name__} masks its attention in a way of its own, which it cannot do from a part of each "
            "row. Set policy.dtensor_cfg.sequence_parallel=false for this model."
        )
    return chosen


def can_share_prompts(twin: PreTrainedModel, config: PolicyConfig, forward: Forward = logits) -> bool:
    """Find out whether packed rows may have one copy of a prompt, where that is asked for and tokens are not divided.

    Args:
        twin: as `choose_attention` left it.
        config: the policy section.
        forward: what is compared.
    """
    packing, section = config.sequence_packing, config.dtensor_cfg
    divided = section.context_parallel_size > 1 or section.pipeline_parallel_size > 1
    if divided or not (packing.enabled and packing.share_prompts):
        return False
    try:
        verify_shared_prompts(twin, forward)
    except ConfigError as error:
        logger.info("Prompts are not shared: %s", error)
        return False
    return True
