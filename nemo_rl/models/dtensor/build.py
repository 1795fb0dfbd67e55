"""Build, check and adapt the model of a policy section, without reading its weights.

Afterwards `parallelize.shard` divides the model among the ranks, and `lazy_weights` reads each rank's part. Invariant:
rank 0 tests the settings on a small probe model, and all ranks raise an error for settings that are not supported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_logprobs import LogitTransform
from nemo_rl.models.adapters.lora_linear import apply_lora
from nemo_rl.models.adapters.slots import put_slots
from nemo_rl.models.dtensor.attention import attention_to_load, can_share_prompts, choose_attention, set_attention
from nemo_rl.models.dtensor.checkpoints.lazy_weights import LazyWeights, weights_left_in_files
from nemo_rl.models.dtensor.heads import (
    CausalLMWithLogprobs,
    RewardModel,
    build_causal_lm,
    require_scoring_head,
)
from nemo_rl.models.dtensor.pipeline.stages import try_division
from nemo_rl.models.dtensor.pipeline.stand_ins import set_outputs_of_layers
from nemo_rl.models.huggingface.layers import freeze_parts, hidden_states
from nemo_rl.models.huggingface.load import load_causal_lm, load_scoring_model
from nemo_rl.models.huggingface.logits import find_transform
from nemo_rl.models.huggingface.probe_model import small_probe_model
from nemo_rl.models.huggingface.recurrent import respect_borders, use_configured_time_steps
from nemo_rl.models.huggingface.rotary import fix_rotary_frequencies
from nemo_rl.utils.errors import ConfigError


def decide_on_rank0[AnswerT](find_out: Callable[[], AnswerT]) -> AnswerT:
    """Call a function on rank 0 and broadcast its result, in a collective call.

    Raises:
        ConfigError: raised on all ranks if the function raised it on rank 0.
    """
    shared: list[Any] = [None, "rank 0 could not find out how the model computes; its log says why."]
    try:
        if dist.get_rank() == 0:
            shared = [find_out(), None]
    except ConfigError as error:
        shared[1] = str(error)
    finally:
        dist.broadcast_object_list(shared, src=0)
    answer, trouble = shared
    if trouble is not None:
        raise ConfigError(trouble)
    return answer


@dataclass(frozen=True)
class Found:
    """Features that an architecture supports, as tested on a small probe model."""

    attention: str
    """Name of the attention function to use."""
    shares_prompts: bool
    """Whether packed rows may hold one copy of a prompt."""
    transform: LogitTransform | None
    """Operations that the model applies to the logits; None for a scoring head, or if they cannot be described."""
    layer_outputs: int | None = None
    """Length of the tuples that layers return, for a model in stages; None if they return tensors."""


@dataclass(frozen=True)
class Built:
    """The model of a policy section, before it is divided among the ranks."""

    model: CausalLMWithLogprobs | RewardModel
    """The wrapped model; parameters that are in the files are on the meta device."""
    lazy_weights: LazyWeights
    """The files with the weights."""
    shares_prompts: bool
    """Features that the architecture supports."""


def build_model(config: PolicyConfig, seed: int) -> Built:
    """Build, check and adapt the model in float32. The call is collective.

    Args:
        seed: run seed, for the initial values of adapters or of a new scalar head.

    Raises:
        ConfigError: the architecture does not support the settings.
    """
    load: Callable[..., PreTrainedModel] = load_causal_lm
    if config.reward_model_cfg.enabled:
        load = partial(load_scoring_model, seed=seed, attributes=config.reward_model_cfg.attributes)
    with weights_left_in_files() as lazy_weights:
        hf = load(
            config.model_name,
            config_overrides=config.hf_config_overrides,
            attn_implementation=attention_to_load(config),
        )
    context = longest_sequence(config)
    fix_rotary_frequencies(hf, context)
    found = decide_on_rank0(lambda: try_out(small_probe_model(hf), context, config))
    return Built(adapted(hf, config, found, seed), lazy_weights, found.shares_prompts)


def build_with_slots(config: PolicyConfig, seed: int) -> Built:
    """Build a frozen model whose linear layers can have the adapters of `models.adapters`. The call is collective.

    Raises:
        ConfigError: the architecture does not support the settings, or has no linear layers.
    """
    built = build_model(config, seed)
    put_slots(built.model.hf)
    return built


def longest_sequence(config: PolicyConfig) -> int:
    """Return the length in tokens of the longest sequence that a model and its engines may get."""
    scores = config.reward_model_cfg.enabled
    engine = config.generation.engine if config.generation is not None and not scores else None
    return engine.max_model_len if engine is not None else config.max_total_sequence_length


def adapted(hf: PreTrainedModel, config: PolicyConfig, found: Found, seed: int) -> CausalLMWithLogprobs | RewardModel:
    """Wrap a model after setting its attention and limits, freezing modules for images or sound, and adding adapters.

    Args:
        hf: the unsharded model, with or without weights.
        found: the features that its architecture supports.
        seed: run seed, for the adapters' initial values.

    Raises:
        ConfigError: the model's head cannot be divided, or the model lacks the layers to adapt.
    """
    set_attention(hf, found.attention)
    use_configured_time_steps(hf)
    set_outputs_of_layers(hf, found.layer_outputs)
    if config.sequence_packing.enabled or config.dtensor_cfg.context_parallel_size > 1:
        respect_borders(hf)
    freeze_parts(hf, config)
    lora = config.dtensor_cfg.lora_cfg
    if config.reward_model_cfg.enabled:
        if lora.enabled:
            apply_lora(hf, lora, seed)
        return RewardModel(hf)
    divided = config.dtensor_cfg.tensor_parallel_size > 1
    model = build_causal_lm(hf, transform=found.transform, chunk_size=config.logprob_chunk_size, divides_head=divided)
    if lora.enabled:
        apply_lora(hf, lora, seed)
    return model


def try_out(probe_model: PreTrainedModel, context: int, config: PolicyConfig) -> Found:
    """Test on a small probe model which features an architecture supports.

    The features are: division into stages, the attention function, shared prompts, and the operations after the output
    head. A reward model is first checked for a scoring head, after which it must have no operations.

    Raises:
        ConfigError: the architecture does not support the settings.
    """
    if config.reward_model_cfg.enabled:
        require_scoring_head(probe_model)
    fix_rotary_frequencies(probe_model, context)
    outputs = try_division(probe_model) if config.dtensor_cfg.pipeline_parallel_size > 1 else None
    if config.reward_model_cfg.enabled:
        attention = choose_attention(probe_model, config, hidden_states)
        return Found(attention, can_share_prompts(probe_model, config, hidden_states), None, outputs)
    attention = choose_attention(probe_model, config)
    return Found(attention, can_share_prompts(probe_model, config), find_transform(probe_model), outputs)
