"""Define layers that Megatron Core lacks: attention in torch, linear layers and norms.

`PortableAttention` is core attention for machines without Transformer Engine. Megatron Core's own `DotProductAttention`
supports neither packed rows nor context parallelism, nor values that are narrower than keys. Invariant: token i of a
sequence sees tokens j <= i of that sequence, within the layer's window.

`MegatronDividedRow` describes how context-parallel ranks divide a row, in Megatron Core's order. Each sequence is cut
into `2 * cp` chunks, and rank r has chunks r and `2 * cp - 1 - r`, so that all ranks have the same work under a causal
mask (`megatron.core.utils.get_batch_on_this_cp_rank`). Packed sequences are cut separately. Invariant: `plan` and
`order` describe the same whole row; selecting gathered keys by `order` gives that row's order.

`PortableLatentAttention` is multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1) with correct
gradients under sharding. Megatron Core's spec without Transformer Engine divides the two down projections over the
tensor-parallel ranks. One projection computes the rotary part of the key for the heads of all ranks, but in the
backward pass each rank keeps only the gradient of its own heads. Here every rank has the whole down projections, as in
Transformer Engine. Under sequence parallelism a rank projects its own tokens and gathers the rotary keys, whose
gradients are summed in the backward pass. Partial gradients of the weights are summed over the ranks, as for norms.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, override

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from nemo_rl.distributed.ranks.collectives import all_gather, all_reduce, reduce_gradient
from nemo_rl.models.attention import AttentionPlan, PackedRow, Piece, Scoring, attend
from nemo_rl.models.attention.cached_pass import CachedPass
from nemo_rl.models.huggingface.recurrent import SequenceGroups

_PACKED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Cache of divided rows by the tensor of their boundaries. All layers of a microbatch have the same tensor object."""
_GROUPS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Cache of `SequenceGroups` by the tensor of their boundaries."""


@dataclass(frozen=True)
class MegatronDividedRow:
    """Part of one rank in a row that context-parallel ranks divide: attention plan, and order of the tokens."""

    plan: AttentionPlan
    """Pieces of attention of this rank's queries, with the keys of the whole row."""
    order: Tensor
    """`[T]` int64: index of each token of the row in the concatenated parts of all ranks."""

    def gather(self, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        """Gather keys `[b, H, t, D]` and values `[b, H, t, D_v]` of all ranks to the whole row, in one collective."""
        both = all_gather(torch.cat([key, value], dim=-1), 2, group, partial_gradient=True)
        whole_key, whole_value = both.index_select(2, self.order).split([key.shape[-1], value.shape[-1]], dim=-1)
        return whole_key, whole_value


@lru_cache(maxsize=16)
def divided_row(length: int, ranks: int, rank: int, device: torch.device) -> MegatronDividedRow:
    """Divide a row that is one sequence. `length` is its number of tokens on all ranks together."""
    return _divide([0, length], ranks, rank, device)


def divided_sequences(bounds: Tensor, ranks: int, rank: int) -> MegatronDividedRow:
    """Divide a row of packed sequences.

    Args:
        bounds: `[S + 1]` int32, start of each sequence in the whole row, and the end of the last sequence.
        ranks: number of context-parallel ranks.
        rank: this rank's number among the context-parallel ranks.
    """
    if bounds not in _PACKED:
        _PACKED[bounds] = _divide(bounds.tolist(), ranks, rank, bounds.device)
    row: MegatronDividedRow = _PACKED[bounds]
    return row


def _divide(bounds: Sequence[int], ranks: int, rank: int, device: torch.device) -> MegatronDividedRow:
    pieces, order = [], []
    for start, stop in pairwise(bounds):
        length = (stop - start) // (2 * ranks)
        assert length * 2 * ranks == stop - start, f"a sequence of {stop - start} tokens over {ranks} ranks"
        place = start // ranks
        for chunk, begin in ((rank, place), (2 * ranks - 1 - rank, place + length)):
            pieces.append(Piece(begin, begin + length, start, start + (chunk + 1) * length))
        for chunk in range(2 * ranks):
            owner = min(chunk, 2 * ranks - 1 - chunk)
            begin = owner * (bounds[-1] // ranks) + place + (chunk >= ranks) * length
            order.append(torch.arange(begin, begin + length))
    return MegatronDividedRow(AttentionPlan(pieces), torch.cat(order).to(device))


def bounds_of(packed: PackedSeqParams) -> Tensor:
    """Return the start of each sequence in the whole row, and the end of the last sequence, `[S + 1]` int32."""
    bounds: Tensor = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    return bounds


def sequence_groups(bounds: Tensor) -> SequenceGroups | None:
    """Return the sequences of a packed row, for layers that compute each of them from an empty state.

    Args:
        bounds: result of `bounds_of`.

    Returns:
        The sequences in groups of similar lengths, or None if there is only one.
    """
    if bounds not in _GROUPS:
        _GROUPS[bounds] = SequenceGroups.of(bounds)
    groups: SequenceGroups | None = _GROUPS[bounds]
    return groups


def parameter_device(config: TransformerConfig) -> torch.device:
    """Return the device of the parameters of a Megatron Core model with this configuration."""
    return torch.device("cpu" if config.use_cpu_initialization else torch.cuda.current_device())


class RMSNorm(nn.Module):
    """Normalise to `x / rms(x) * w`, or to `x / rms(x) * (1 + w)` if the weight is centred at zero.

    The norm computes in float32 or wider and rounds where transformers does: before the product with `w`, or after the
    product with `1 + w`. Under sequence parallelism each rank normalises its own tokens and has a partial gradient of
    the weight. Megatron Core sums it over the tensor-parallel ranks, because the parameter is marked for this.

    Args:
        config: sets the dtype of the weight, sequence parallelism, and whether the weight is centred at zero.
        hidden_size: width of the input.
        eps: added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self._centred_at_zero = eps, config.layernorm_zero_centered_gamma
        fill = torch.zeros if self._centred_at_zero else torch.ones
        self.weight = nn.Parameter(fill(hidden_size, dtype=config.params_dtype, device=parameter_device(config)))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., hidden_size]` along the last dimension."""
        wide = self._normalised(x)
        if self._centred_at_zero:
            return (wide * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)
        return self.weight * wide.to(x.dtype)

    def _normalised(self, x: Tensor) -> Tensor:
        """Return `x` in float32 at least, divided by the root of its mean square."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)


class WideRMSNorm(RMSNorm):
    """An `RMSNorm` that rounds after the product with the weight, as in Nemotron-H."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        wide = self._normalised(x)
        return (self.weight.to(wide.dtype) * wide).to(x.dtype)


class PortableAttention(MegatronModule):
    """Causal attention of one tensor-parallel rank's heads over padded, packed or divided rows.

    Megatron Core's attention layers build their core attention with these arguments. Attention sinks
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
            attention_mask: the `CachedPass` of an engine, whose cache has earlier tokens. A tensor is ignored: the mask
                is always causal, and right-padded rows need no other mask.
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
        bounds, cp = bounds_of(packed), self._groups.cp
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
        """Return the sharded state, which consists of the attention sinks divided over tensor-parallel ranks."""
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
    """Self-attention with different rotary frequencies in windowed layers and in other layers, as in Gemma 3.

    The model's rotary embedding has both sets of frequencies, first those of windowed layers. Each layer selects one.
    """

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Compute self-attention (`SelfAttention`), where `rotary_pos_emb` is `[T, 1, 1, 2 * D]`."""
        config = self.config
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number)
        # # Megatron Core repeats the frequencies to [windowed, full, windowed, full], each of width D / 2.
        own = rotary_pos_emb.unflatten(-1, (2, 2, -1))[..., 0 if windowed else 1, :].flatten(-2)
        return super().forward(*args, rotary_pos_emb=own, **kwargs)


class JointHeadNorm(nn.Module):
    """RMS norm of queries or keys over all heads together, which tensor-parallel ranks divide.

    Every rank has the whole weight, and uses the part of its own heads. Megatron Core sums the gradients of norms of
    queries and keys over tensor-parallel ranks.

    Args:
        config: dtype of the weight and epsilon.
        num_heads: number of heads of all ranks.
        head_dim: width of a head.
        group: tensor-parallel ranks. If there are more ranks than heads, adjacent ranks have the same head.
    """

    def __init__(self, config: TransformerConfig, num_heads: int, head_dim: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._eps, self._group = config.layernorm_epsilon, group if group.size() > 1 else None
        self._width, self._copies = num_heads * head_dim, max(group.size() // num_heads, 1)
        own = max(num_heads // group.size(), 1) * head_dim
        first = group.rank() // self._copies * own
        self._own = slice(first, first + own)
        self.weight = nn.Parameter(torch.ones(self._width, dtype=config.params_dtype, device=parameter_device(config)))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise this rank's heads `[..., H, D]`."""
        wide = x.flatten(-2).to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum(-1, keepdim=True) / self._copies
        squares = reduce_gradient(all_reduce(squares, self._group), self._group)
        wide = wide * torch.rsqrt(squares / self._width + self._eps)
        return (self.weight[self._own] * wide.to(x.dtype)).view_as(x)


class JointlyNormedAttention(SelfAttention):
    """Self-attention that normalises queries, and keys, over all heads together, as in MiniMax-M2."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # # The constructor makes norms of single heads, so they are replaced after it.
        assert config.num_query_groups is not None and config.kv_channels is not None
        group = self.pg_collection.tp
        self.q_layernorm = JointHeadNorm(config, config.num_attention_heads, config.kv_channels, group)
        self.k_layernorm = JointHeadNorm(config, config.num_query_groups, config.kv_channels, group)


class ReplicatedLinear(nn.Module):
    """A linear layer without bias that tensor-parallel ranks do not divide.

    Args:
        inputs: width of the input.
        outputs: width of the output.
        config: dtype, initialisation and sequence parallelism.
    """

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(outputs, inputs, dtype=config.params_dtype, device=parameter_device(config))
        )
        if config.perform_initialization:
            assert config.init_method is not None
            config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Map `[..., inputs]` to `[..., outputs]`. Return None as the bias, as Megatron Core's linear layers do."""
        return F.linear(x, self.weight), None


class ExpertRowParallelLinear(RowParallelLinear):
    """A row-parallel layer of an expert whose output supports an in-place addition of the bias.

    If one rank holds a whole expert, Megatron Core's layer returns the output of a custom autograd function that shares
    its input's storage, and autograd forbids in-place changes of such an output.
    """

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(x)
        return out if bias is None else out.clone(), bias


@cache
def with_output_norm(linear: type[nn.Module], norm: Any) -> type[nn.Module]:
    """Return a class of linear layers with a norm on their output, as in Gemma 3 before the residual addition.

    Args:
        linear: a row-parallel linear class of Megatron Core or Transformer Engine.
        norm: class of the norm, whose weight gets the name `post_layernorm.weight` in the layer.
    """

    class WithOutputNorm(linear):  # type: ignore[valid-type,misc]
        output_norm = (linear, norm)

        def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.post_layernorm = norm(config=config, hidden_size=output_size, eps=config.layernorm_epsilon)

        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            out, bias = super().forward(x)
            assert bias is None, "a bias would have to be added before the norm"
            return self.post_layernorm(out), None

    return WithOutputNorm


def set_latent_eps(model: nn.Module, eps: float) -> None:
    """Set the epsilon of the norms of latents in all layers. Transformer Engine may fuse them into linear layers."""
    for attention in (module for module in model.modules() if isinstance(module, MLASelfAttention)):
        for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
            module = getattr(attention, name, None)
            if module is not None and hasattr(module, "eps"):
                module.eps = eps


class PortableLatentAttention(MLASelfAttention):
    """`MLASelfAttention` with undivided down projections."""

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # # The constructor accepts no other class for these two layers, so they are replaced after it.
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, config.q_lora_rank, config)
        latent_and_rotary = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, latent_and_rotary, config)


_COPIES = "_fp8_workspaces"
"""Attribute of Transformer Engine's layers with float8 copies of weights, made in the first pass of an update."""


def free_float8_copies(chunks: Iterable[nn.Module]) -> None:
    """Free the float8 copies of weights. The next forward pass makes new copies."""
    for chunk in chunks:
        for module in chunk.modules():
            getattr(module, _COPIES, {}).clear()
