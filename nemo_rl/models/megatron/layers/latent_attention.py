"""Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1) with correct gradients under sharding.

Megatron Core's spec without Transformer Engine divides the two down projections over the tensor-parallel ranks. The
rotary part of the key, an output of one of them, is used by the heads of all ranks, but in the backward pass each rank
keeps only the gradient of its own heads. In this module every rank has the whole down projections, as with Transformer
Engine. Under sequence parallelism a rank projects its own tokens and gathers the rotary keys, whose gradients are
summed in the backward pass. The weights' partial gradients are summed like those of norms.
"""

from typing import Any

from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig

from nemo_rl.models.megatron.layers.linear import ReplicatedLinear


class PortableLatentAttention(MLASelfAttention):
    """`MLASelfAttention` with whole down projections."""

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # The constructor accepts no other class for these two layers, so they are replaced afterwards.
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, config.q_lora_rank, config)
        latent_and_rotary = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, latent_and_rotary, config)
