"""Make the model of a policy section: its class and configuration, checked and adapted, its weights left in the files.

Before `parallelize.shard` spreads it over the ranks and `materialize` reads each rank's part. Invariant: what cannot
be honoured is found on a small twin by one rank, and refused by all.
"""

from dataclasses import dataclass
from functools import partial

from transformers.modeling_utils import PreTrainedModel

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_logprobs import LogitTransform
from nemo_rl.models.dtensor.attention import attention_to_load, can_share_prompts, choose_attention
from nemo_rl.models.dtensor.causal_lm import CausalLMWithLogprobs, build_causal_lm
from nemo_rl.models.dtensor.decide_on_rank0 import found_by_one_rank
from nemo_rl.models.dtensor.lora.modules import apply_lora
from nemo_rl.models.dtensor.pipeline.stages import try_division
from nemo_rl.models.dtensor.reward_model import RewardModel, require_scoring_head
from nemo_rl.models.huggingface.head import find_transform
from nemo_rl.models.huggingface.layers import hidden_states
from nemo_rl.models.huggingface.lazy_weights import Unread, weights_left_in_files
from nemo_rl.models.huggingface.load import load_causal_lm, load_scoring_model
from nemo_rl.models.huggingface.probe_model import small_twin
from nemo_rl.models.huggingface.rotary import fix_rotary_frequencies


@dataclass(frozen=True)
class Found:
    """What an architecture can do, found out on a small twin.

    Attributes:
        attention: name of the attention function that it takes.
        shares_prompts: whether packed rows may have one copy of a prompt.
        transform: what follows its head; None for a scoring head, and where that cannot be described.
    """

    attention: str
    shares_prompts: bool
    transform: LogitTransform | None


@dataclass(frozen=True)
class Built:
    """A model of a policy section before it is spread over the ranks.

    Attributes:
        model: the wrapped model, its parameters on the meta device where files have them.
        unread: these files.
        shares_prompts: see `Found`.
    """

    model: CausalLMWithLogprobs | RewardModel
    unread: Unread
    shares_prompts: bool


def build_model(config: PolicyConfig, seed: int) -> Built:
    """Make, check and adapt the model, in float32; collective.

    Args:
        config: the policy section.
        seed: run seed, for the adapters' first values.

    Raises:
        ConfigError: the architecture cannot do what is asked.
    """
    load = load_scoring_model if config.reward_model_cfg.enabled else load_causal_lm
    with weights_left_in_files() as unread:
        hf = load(
            config.model_name,
            config_overrides=config.hf_config_overrides,
            attn_implementation=attention_to_load(config),
        )
    context = longest_sequence(config)
    fix_rotary_frequencies(hf, context)
    found = found_by_one_rank(partial(_try_twin, hf, context, config))
    return Built(adapted(hf, config, found, seed), unread, found.shares_prompts)


def longest_sequence(config: PolicyConfig) -> int:
    """Tokens of the longest sequence that a model and its engines may see."""
    scores = config.reward_model_cfg.enabled
    engine = config.generation.engine if config.generation is not None and not scores else None
    return engine.max_model_len if engine is not None else config.max_total_sequence_length


def adapted(hf: PreTrainedModel, config: PolicyConfig, found: Found, seed: int) -> CausalLMWithLogprobs | RewardModel:
    """Wrap a model and give it its attention and adapters, in place.

    Args:
        hf: the unsharded model, with weights or without.
        config: the policy section.
        found: what its architecture can do.
        seed: run seed, for the adapters' first values.

    Raises:
        ConfigError: its head cannot be divided, or there are no such layers to adapt.
    """
    hf.set_attn_implementation(found.attention)
    if config.reward_model_cfg.enabled:
        return RewardModel(hf)
    divided = config.dtensor_cfg.tensor_parallel_size > 1
    model = build_causal_lm(hf, transform=found.transform, chunk_size=config.logprob_chunk_size, divides_head=divided)
    if config.dtensor_cfg.lora_cfg.enabled:
        apply_lora(hf, config.dtensor_cfg.lora_cfg, seed)
    return model


def _try_twin(hf: PreTrainedModel, context: int, config: PolicyConfig) -> Found:
    return try_out(small_twin(hf), context, config)


def try_out(twin: PreTrainedModel, context: int, config: PolicyConfig) -> Found:
    """Find out on a small twin what the architecture can do.

    Whether it divides into stages, which attention it takes, whether prompts may be shared, and what follows its head.

    Of a reward model first whether it scores as one; what follows its head is not asked.

    Raises:
        ConfigError: it cannot do what is asked.
    """
    if config.reward_model_cfg.enabled:
        require_scoring_head(twin)
    fix_rotary_frequencies(twin, context)
    if config.dtensor_cfg.pipeline_parallel_size > 1:
        try_division(twin)
    if config.reward_model_cfg.enabled:
        return Found(
            choose_attention(twin, config, hidden_states), can_share_prompts(twin, config, hidden_states), None
        )
    return Found(choose_attention(twin, config), can_share_prompts(twin, config), find_transform(twin))
