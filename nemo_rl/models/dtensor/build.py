"""Make the model of a policy section: its class and configuration, checked and adapted, its weights left in the files.

Before `parallelize.shard` spreads it over the ranks and `materialize` reads each rank's part. Invariant: what cannot
be honoured is found on a small twin by one rank, and refused by all.
"""

from functools import partial

from transformers.modeling_utils import PreTrainedModel

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_logprobs import LogitTransform
from nemo_rl.models.dtensor.attention import attention_to_load, can_share_prompts, choose_attention
from nemo_rl.models.dtensor.causal_lm import CausalLMWithLogprobs, build_causal_lm
from nemo_rl.models.dtensor.lora import apply_lora
from nemo_rl.models.dtensor.pipeline.stages import try_division
from nemo_rl.models.dtensor.reward_model import RewardModel, require_scoring_head
from nemo_rl.models.dtensor.verdict import found_by_one_rank
from nemo_rl.models.huggingface.head import find_transform
from nemo_rl.models.huggingface.layers import hidden_states
from nemo_rl.models.huggingface.load import load_causal_lm, load_scoring_model
from nemo_rl.models.huggingface.rotary import fix_rotary_frequencies
from nemo_rl.models.huggingface.twin import small_twin
from nemo_rl.models.huggingface.unread import Unread, weights_left_in_files


def build_model(config: PolicyConfig, seed: int) -> tuple[CausalLMWithLogprobs | RewardModel, Unread, bool]:
    """Make, check and adapt the model, in float32; collective.

    Args:
        config: the policy section.
        seed: run seed, for the adapters' first values.

    Returns:
        The model, its parameters on the meta device where files have them, these files, and whether packed rows may
        have one copy of a prompt.

    Raises:
        ConfigError: the architecture cannot do what is asked.
    """
    scores = config.reward_model_cfg.enabled
    load = load_scoring_model if scores else load_causal_lm
    with weights_left_in_files() as unread:
        hf = load(
            config.model_name,
            config_overrides=config.hf_config_overrides,
            attn_implementation=attention_to_load(config),
        )
    engine = config.generation.engine if config.generation is not None and not scores else None
    context = engine.max_model_len if engine is not None else config.max_total_sequence_length
    fix_rotary_frequencies(hf, context)
    attention, shares_prompts, transform = found_by_one_rank(partial(_try_out, hf, context, config))
    hf.set_attn_implementation(attention)
    if scores:
        return RewardModel(hf), unread, shares_prompts
    divided = config.dtensor_cfg.tensor_parallel_size > 1
    model = build_causal_lm(hf, transform=transform, chunk_size=config.logprob_chunk_size, divides_head=divided)
    if config.dtensor_cfg.lora_cfg.enabled:
        apply_lora(hf, config.dtensor_cfg.lora_cfg, seed)
    return model, unread, shares_prompts


def _try_out(hf: PreTrainedModel, context: int, config: PolicyConfig) -> tuple[str, bool, LogitTransform | None]:
    """Find out on a small twin what the architecture can do.

    Whether it divides into stages, which attention it takes, whether prompts may be shared, and what follows its head.

    Of a reward model first whether it scores as one; what follows its head is not asked.
    """
    twin = small_twin(hf)
    if config.reward_model_cfg.enabled:
        require_scoring_head(twin)
    fix_rotary_frequencies(twin, context)
    if config.dtensor_cfg.pipeline_parallel_size > 1:
        try_division(twin)
    if config.reward_model_cfg.enabled:
        return choose_attention(twin, config, hidden_states), can_share_prompts(twin, config, hidden_states), None
    return choose_attention(twin, config), can_share_prompts(twin, config), find_transform(twin)
