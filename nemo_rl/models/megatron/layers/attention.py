"""Core attention in torch for machines without Transformer Engine, and attention with two sets of rotary frequencies.

Megatron Core's own `DotProductAttention` supports neither packed rows nor context parallelism, nor values that are
narrower than keys. Invariant: token i of a sequence sees tokens j <= i of that sequence, within the layer's window.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from nemo_rl.models.attention import AttentionPlan, PackedRow, Piece, Scoring, attend
from nemo_rl.models.attention.cached import CachedPass
from nemo_rl.models.megatron.layers.norm import parameter_device
from nemo_rl.models.megatron.layers.zigzag import divided_row, divided_sequences


class PortableAttention(MegatronModule):
    """Causal attention of one tensor-parallel rank's heads over padded, packed or divided rows.

    Takes the arguments with which Megatron Core's attention layers build their core attention. Attention sinks
    (`softmax_type="learnable"`) are the parameter `softmax_offset`, `[heads of the rank]`, as in Transformer Engine.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        self._layer_number = layer_number
        assert attention_type == "self" and attn_mask_type is AttnMaskType.causal, (attention_type, attn_mask_type)
        self._groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self._dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        width = k_channels or config.kv_channels
        self._scale = width**-0.5 if softmax_scale is None else softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window = config.window_size[0] + 1 if windowed else None
        self.softmax_offset = self._sinks(config.num_attention_heads // self._groups.tp.size())

    def _sinks(self, heads: int) -> Tensor | None:
        if self.config.softmax_type == "vanilla":
            return None
        sinks = torch.zeros(heads, dtype=self.config.params_dtype, device=parameter_device(self.config))
        if self.config.softmax_type == "off-by-one":
            return sinks
        parameter = nn.Parameter(sinks)
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        return parameter

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: CachedPass | Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Compute the attention of this rank's tokens and heads.

        Args:
            query: `[t, b, H, D]`, or packed `[t, H, D]`.
            key: `[t, b, H_kv, D]`, or packed.
            value: `[t, b, H_kv, D_v]`, or packed.
            attention_mask: the pass of an engine, whose cache holds earlier tokens (Megatron Core passes on the
                argument of the model). A tensor is ignored: the mask is causal, and right-padded rows need no other.
            attn_mask_type: causal.
            attention_bias: must be None.
            packed_seq_params: starts of the packed sequences; None for padded rows.

        Returns:
            `[t, b, H * D_v]`, or packed `[t, H * D_v]`.
        """
        assert attention_bias is None and attn_mask_type in (None, AttnMaskType.causal)
        scoring = Scoring(
            self._scale, self._window, sinks=self.softmax_offset, dropout=self._dropout if self.training else 0.0
        )
        if packed_seq_params is not None:
            query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
            plan, key, value = self._packed(key, value, packed_seq_params)
            return attend(query, key, value, plan, scoring)[0].transpose(0, 1).flatten(1)
        if isinstance(attention_mask, CachedPass):
            return attention_mask.attend(self._layer_number, query, key, value, scoring)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        plan, key, value = self._padded(query.shape[2], key, value)
        return attend(query, key, value, plan, scoring).permute(2, 0, 1, 3).flatten(2)

    def _packed(self, key: Tensor, value: Tensor, packed: PackedSeqParams) -> tuple[AttentionPlan, Tensor, Tensor]:
        bounds = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        cp = self._groups.cp
        if cp.size() == 1:
            return PackedRow(bounds, packed.max_seqlen_q), key, value
        row = divided_sequences(bounds, cp.size(), cp.rank())
        return row.plan, *row.gather(key, value, cp)

    def _padded(self, queries: int, key: Tensor, value: Tensor) -> tuple[AttentionPlan, Tensor, Tensor]:
        cp = self._groups.cp
        if cp.size() == 1:
            return AttentionPlan([Piece(0, queries, 0, key.shape[2])]), key, value
        row = divided_row(queries * cp.size(), cp.size(), cp.rank(), key.device)
        return row.plan, *row.gather(key, value, cp)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the sinks, divided over the tensor-parallel ranks."""
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._groups.tp,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        return sharded


class TwoRotaryAttention(SelfAttention):
    """Self-attention with different rotary frequencies in windowed layers and other layers, as in Gemma 3.

    The model's rotary embedding has both sets of frequencies, those of windowed layers first; each layer takes its own.
    """

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """See `SelfAttention`; `rotary_pos_emb` is `[T, 1, 1, 2 * D]`."""
        config = self.config
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number)
        # Megatron Core repeats the frequencies: [windowed, full, windowed, full], each of D / 2.
        own = rotary_pos_emb.unflatten(-1, (2, 2, -1))[..., 0 if windowed else 1, :].flatten(-2)
        return super().forward(*args, rotary_pos_emb=own, **kwargs)
