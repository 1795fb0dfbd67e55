"""Gated delta nets on every device: Megatron Core's block, computed by the functions of transformers.

    in_proj ─► q | k | v | z | beta | alpha ─► convolution of q, k, v ─► delta rule ─► norm ─► gate by z ─► out_proj

Tensor-parallel ranks divide the heads of keys, each with its heads of values. Context-parallel ranks exchange tokens
for heads before the convolution, so each rank computes whole rows of some heads. Source: gated delta nets (Yang et al.
2024, arXiv:2412.06464).

Invariant: a sequence of a packed row gets the outputs that it gets in a row of its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, override

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import (
    GatedDeltaNet,
    GatedDeltaNetSubmodules,
    common,
    get_parameter_local_cp,
    tensor_a2a_cp2hp,
    tensor_a2a_hp2cp,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule

from nemo_rl.models.attention.cached_pass import CachedPass
from nemo_rl.models.huggingface.recurrent import without_borders
from nemo_rl.models.megatron.model.layers import (
    bounds_of,
    divided_row,
    divided_sequences,
    parameter_device,
    sequence_groups,
)


def delta_net_spec(engine: bool) -> ModuleSpec:
    """Return the specification of a gated delta net, which takes the place of a layer's attention.

    Args:
        engine: whether its linear layers are those of Transformer Engine.
    """
    linear = (TEColumnParallelLinear, TERowParallelLinear) if engine else (ColumnParallelLinear, RowParallelLinear)
    return ModuleSpec(PortableDeltaNet, submodules=GatedDeltaNetSubmodules(linear[0], HeadNorm, linear[1]))


class PortableDeltaNet(GatedDeltaNet):
    """Megatron Core's gated delta net in the place of a layer's attention.

    Megatron Core's own forward pass needs the package flash-linear-attention, and has another rule without packed rows.
    Here the convolution and the rule are those of the other backend, which use this package and causal-conv1d if they
    are installed.

    Args:
        config: sizes of heads (`linear_*`).
        submodules: classes of the linear layers and of the norm.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **ignored: Any,
    ) -> None:
        with _without_package():
            super().__init__(config, submodules, layer_number, pg_collection=pg_collection)
        self.out_norm.group = pg_collection.tp
        self._convolve = without_borders(causal_conv1d_fn)
        self._rule = without_borders(torch_chunk_gated_delta_rule)

    @override
    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self.gated_delta_rule = torch_chunk_gated_delta_rule

    @override
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: CachedPass | Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **ignored: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the block for `[t, b, D]`. Arguments of attention layers are ignored."""
        assert not isinstance(attention_mask, CachedPass), "states are not kept from token to token"
        projected, _ = self.in_proj(hidden_states)
        order = self._order(packed_seq_params, len(projected))
        if order is not None:
            by_rank = _shares(self.in_proj_split_sections, self.cp_size, projected.device)
            projected = tensor_a2a_cp2hp(
                projected.index_select(-1, by_rank), 0, -1, self.pg_collection.cp, undo_attention_load_balancing=False
            ).index_select(0, order)
        qkv, gate, beta, alpha = projected.transpose(0, 1).split(self.feat_dim_split, dim=-1)
        scanned = self._scan(qkv, beta, alpha, packed_seq_params)
        hidden = self.out_norm(scanned, gate.unflatten(-1, scanned.shape[-2:])).flatten(2).transpose(0, 1).contiguous()
        if order is not None:
            hidden = tensor_a2a_hp2cp(
                hidden.index_select(0, order.argsort()),
                0,
                -1,
                self.pg_collection.cp,
                redo_attention_load_balancing=False,
            )
        out: tuple[Tensor, Tensor | None] = self.out_proj(hidden)
        return out

    def _order(self, packed: PackedSeqParams | None, tokens: int) -> Tensor | None:
        """Return the index of each token of the row in the concatenated parts of context-parallel ranks.

        Args:
            tokens: number of tokens of this rank.

        Returns:
            `[T]` int64, or None without context parallelism.
        """
        ranks, rank = self.cp_size, self.pg_collection.cp.rank()
        if ranks == 1:
            return None
        if packed is not None:
            return divided_sequences(bounds_of(packed), ranks, rank).order
        return divided_row(tokens * ranks, ranks, rank, self.A_log.device).order

    def _scan(self, qkv: Tensor, beta: Tensor, alpha: Tensor, packed: PackedSeqParams | None) -> Tensor:
        """Compute the convolution and the rule of whole rows for this rank's heads.

        Args:
            qkv: `[b, T, q | k | v]`.
            beta: `[b, T, H]`, logits of the strengths of updates.
            alpha: `[b, T, H]`, time steps before the softplus.
            packed: sequences of the only row; None for padded rows.

        Returns:
            `[b, T, H, P]`.
        """
        groups = None if packed is None else sequence_groups(bounds_of(packed))
        if groups is None:
            return self._rows(qkv, beta, alpha)
        batches = zip(*(groups.batches(each, 1) for each in (qkv, beta, alpha)), strict=True)
        return groups.row([self._rows(*batch) for batch in batches], 1)

    def _rows(self, qkv: Tensor, beta: Tensor, alpha: Tensor) -> Tensor:
        """Compute `_scan` for rows that are one sequence each."""
        sections = [self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp]
        cp = self.pg_collection.cp
        weight = get_parameter_local_cp(self.conv1d.weight, 0, cp, sections)[:, 0]
        decay, bias = (get_parameter_local_cp(each, 0, cp).float() for each in (self.A_log, self.dt_bias))
        mixed = self._convolve(qkv.transpose(1, 2), weight, None, activation="silu").transpose(1, 2)
        query, key, value = mixed.split([size // self.cp_size for size in sections], dim=-1)
        repeats = self.num_value_heads // self.num_key_heads
        query, key = (each.unflatten(-1, (-1, self.key_head_dim)) for each in (query, key))
        if repeats > 1:
            query, key = (each.repeat_interleave(repeats, dim=2) for each in (query, key))
        scanned: Tensor
        scanned, _ = self._rule(
            query,
            key,
            value.unflatten(-1, (-1, self.value_head_dim)),
            g=-decay.exp() * F.softplus(alpha.float() + bias),
            beta=beta.sigmoid(),
            use_qk_l2norm_in_kernel=True,
        )
        return scanned


class HeadNorm(nn.Module):
    """RMS norm of each head, whose result is gated.

    All heads have the same weight, and tensor-parallel ranks have different heads. Megatron Core sums the gradients of
    such weights only under sequence parallelism, so the norm sums them itself. The weight is centred at one, whatever
    the configuration sets for other norms.

    Args:
        config: dtype of the weight.
        hidden_size: width P of a head.
        eps: added to the mean square.
    """

    group: dist.ProcessGroup
    """Tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=parameter_device(config)))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise `[b, T, H, P]`, and multiply by the SiLU of the gate. Round as transformers does."""
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.group)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return (weight * wide.to(x.dtype) * F.silu(gate.float())).to(x.dtype)


@lru_cache(maxsize=8)
def _shares(sizes: Sequence[int], ranks: int, device: torch.device) -> Tensor:
    """Return the channels of several blocks in the order of ranks, each of which has a share of every block, int64."""
    blocks = torch.arange(sum(sizes), device=device).split(list(sizes))
    return torch.cat([block.view(ranks, -1) for block in blocks], dim=1).flatten()


@contextmanager
def _without_package() -> Iterator[None]:
    """Run a block in which Megatron Core makes gated delta nets without the package flash-linear-attention."""
    before = common.HAVE_FLA
    common.HAVE_FLA = True
    try:
        yield
    finally:
        common.HAVE_FLA = before
