"""Mamba-2 blocks on every device: Megatron Core's block, with the library's scan where its CUDA packages are missing.

    in_proj ─► z | x | B | C | dt ─► convolution of x, B, C ─► scan of states ─► gate by z ─► norm ─► out_proj

Tensor-parallel ranks divide the heads and their groups. Context-parallel ranks exchange tokens for heads before the
convolution, so each rank scans whole rows of some heads. Source: Mamba-2 (Dao and Gu 2024, arXiv:2405.21060).

Invariant: a sequence of a packed row gets the outputs that it gets in a row of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from nemo_rl.models.attention.cached_pass import CachedPass
from nemo_rl.models.megatron.model.family import Hybrid
from nemo_rl.models.megatron.model.layers import bounds_of, divided_row, divided_sequences, sequence_groups

_HAS_KERNELS = find_spec("mamba_ssm") is not None and find_spec("causal_conv1d") is not None


def mamba_spec(hybrid: Hybrid, engine: bool) -> ModuleSpec:
    """Return the specification of a Mamba-2 block, which takes the place of a layer's attention.

    Args:
        engine: whether its linear layers are those of Transformer Engine.
    """
    linear = (TEColumnParallelLinear, TERowParallelLinear) if engine else (ColumnParallelLinear, RowParallelLinear)
    sizes = {"d_conv": hybrid.window, "chunk_size": hybrid.chunk, "steps": hybrid.steps}
    return ModuleSpec(PortableMamba, params=sizes, submodules=MambaMixerSubmodules(*linear))


class PortableMamba(MambaMixer):
    """Megatron Core's Mamba-2 block in the place of a layer's attention.

    Args:
        config: sizes of heads, groups and states.
        submodules: classes of the linear layers.
        steps: smallest and largest time step.
        **sizes: `d_conv` and `chunk_size`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaMixerSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        *,
        steps: tuple[float, float],
        cp_comm_type: str | None = None,
        **sizes: Any,
    ) -> None:
        with _with_own_norm():
            super().__init__(
                config,
                submodules,
                d_model=config.hidden_size,
                layer_number=layer_number,
                pg_collection=pg_collection,
                **sizes,
            )
        self.norm.eps = config.layernorm_epsilon
        self._limits = steps

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
        projected = self.cp.pre_conv_ssm(projected)
        order = self._order(packed_seq_params, len(projected))
        if order is not None:
            projected = projected.index_select(0, order)
        scanned = self._scan(projected.transpose(0, 1).contiguous(), packed_seq_params).transpose(0, 1).contiguous()
        if order is not None:
            scanned = scanned.index_select(0, order.argsort())
        out: tuple[Tensor, Tensor | None] = self.out_proj(self.norm(self.cp.post_conv_ssm(scanned)))
        return out

    def _order(self, packed: PackedSeqParams | None, tokens: int) -> Tensor | None:
        """Return the order of a packed row's tokens after an exchange that takes the row for one sequence."""
        ranks, rank = self.cp.cp_group.size(), self.cp.cp_group.rank()
        if packed is None or ranks == 1:
            return None
        bounds = bounds_of(packed)
        exchanged = divided_row(tokens, ranks, rank, bounds.device).order
        return exchanged.argsort()[divided_sequences(bounds, ranks, rank).order]

    def _scan(self, projected: Tensor, packed: PackedSeqParams | None) -> Tensor:
        """Return the gated outputs `[b, T, heads * P]` of the convolution and scan of `[b, T, z | x | B | C | dt]`."""
        weights = ScanWeights(
            self.cp.get_conv1d_weight()[:, 0],
            self.cp.get_conv1d_bias(),
            self.cp.get_dt_bias().float(),
            -torch.exp(self.cp.get_A_log().float()),
            self.cp.get_D(),
        )
        num_groups = self.cp.ngroups_local_tpcp
        if projected.is_cuda and _HAS_KERNELS:
            numbers = None if packed is None else packed.seq_idx
            assert packed is None or numbers is not None, "the kernels would mix the sequences"
            found: Tensor = mamba_mixer.mamba_split_conv1d_scan_combined(
                projected,
                **vars(weights),
                chunk_size=self.chunk_size,
                headdim=self.headdim,
                ngroups=num_groups,
                seq_idx=numbers,
                dt_limit=self._limits,
                activation="silu",
                norm_before_gate=False,
            )
            return found
        groups = None if packed is None else sequence_groups(bounds_of(packed))
        rows = [projected] if groups is None else groups.batches(projected, 1)
        outputs = [split_conv1d_scan(row, weights, num_groups, self.chunk_size, self._limits) for row in rows]
        return outputs[0] if groups is None else groups.row(outputs, 1)


class GroupedRMSNorm(nn.Module):
    """RMS norm of each group of channels, as in the package mamba-ssm, for inputs that are gated already."""

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        group_size: int,
        norm_before_gate: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        assert not norm_before_gate
        self.eps, self._group_size = eps, group_size
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., C]`."""
        wide = x.float().unflatten(-1, (-1, self._group_size))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.flatten(-2).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the sharded state. Tensor-parallel ranks divide the weight."""
        state = self.state_dict(prefix="", keep_vars=True)
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {"weight": 0}, sharded_offsets, **groups
        )
        return sharded


@contextmanager
def _with_own_norm() -> Iterator[None]:
    """Run a block in which Megatron Core makes Mamba-2 blocks without the package mamba-ssm."""
    before = mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.ExtendedRMSNorm
    if not before[0]:
        mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.ExtendedRMSNorm = True, GroupedRMSNorm
    try:
        yield
    finally:
        mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.ExtendedRMSNorm = before


@dataclass(frozen=True)
class ScanWeights:
    """Weights of the convolution and scan of a rank's H heads, by the names in the package mamba-ssm."""

    conv1d_weight: Tensor
    """`[x | B | C, window]`."""
    conv1d_bias: Tensor
    """`[x | B | C]`."""
    dt_bias: Tensor
    """`[H]` float32, added to the time steps before the softplus."""
    A: Tensor
    """`[H]` float32, logarithm of the decay per unit of time, negative."""
    D: Tensor
    """`[H]` float32, factor of the inputs in the outputs."""


def split_conv1d_scan(
    projected: Tensor, weights: ScanWeights, num_groups: int, chunk_size: int, steps: tuple[float, float]
) -> Tensor:
    """Compute the convolution, the scan and the gate of a Mamba-2 block, in float32 except for the convolution.

    Args:
        projected: `[b, T, z | x | B | C | dt]`.
        num_groups: number of groups of heads with common B and C.
        chunk_size: number of tokens that are computed together.
        steps: smallest and largest time step.

    Returns:
        `[b, T, H * P]`, in the dtype of `projected`.
    """
    heads, channels = len(weights.A), len(weights.conv1d_weight)
    inner = projected.shape[-1] - channels - heads
    z, mixed, dt = projected.split([inner, channels, heads], dim=-1)
    tokens, past = mixed.shape[1], weights.conv1d_weight.shape[1] - 1
    kernel, bias = weights.conv1d_weight[:, None], weights.conv1d_bias
    mixed = F.conv1d(mixed.transpose(1, 2), kernel, bias, padding=past, groups=channels)
    mixed = F.silu(mixed[..., :tokens]).transpose(1, 2).float()
    x, B, C = mixed.split([inner, (channels - inner) // 2, (channels - inner) // 2], dim=-1)
    x = x.unflatten(-1, (num_groups, heads // num_groups, -1))
    B, C = (each.unflatten(-1, (num_groups, -1)) for each in (B, C))
    step = F.softplus(dt.float() + weights.dt_bias).clamp(*steps)
    step, A, D = (each.unflatten(-1, (num_groups, -1)) for each in (step, weights.A, weights.D.float()))
    scanned = chunked_scan(x, step, A, B, C, chunk_size) + x * D[..., None]
    return (scanned.flatten(2) * F.silu(z.float())).to(projected.dtype)


def chunked_scan(x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int) -> Tensor:
    """Return `y_t = C_t . s_t` of the states `s_t = exp(step_t A) s_{t-1} + step_t x_t B_t`, beginning with zero.

    Args:
        x: `[b, T, G, R, P]`, with R heads in each of G groups.
        step: `[b, T, G, R]`.
        A: `[G, R]`.
        B: `[b, T, G, N]`.
        C: `[b, T, G, N]`.
        chunk_size: number of tokens that are computed together.
    """
    state = x.new_zeros(len(x), *x.shape[2:], B.shape[-1])
    outputs = []
    for x_c, step_c, B_c, C_c in zip(*(each.split(chunk_size, dim=1) for each in (x, step, B, C)), strict=True):
        change = (step_c * A).permute(0, 2, 3, 1)
        between, since = _sums_between(change).exp(), change.cumsum(-1).exp()
        inputs = x_c * step_c[..., None]
        scores = torch.einsum("blgn,bsgn->bgls", C_c, B_c)[:, :, None] * between
        inside = torch.einsum("bgrls,bsgrp->blgrp", scores, inputs)
        before = torch.einsum("blgn,bgrpn,bgrl->blgrp", C_c, state, since)
        outputs.append(inside + before)
        added = torch.einsum("bgrs,bsgn,bsgrp->bgrpn", between[..., -1, :], B_c, inputs)
        state = state * since[..., -1, None, None] + added
    return torch.cat(outputs, dim=1)


def _sums_between(x: Tensor) -> Tensor:
    """Return the sums of `x[..., s + 1 : l + 1]` at `[..., l, s]`, and -inf where l < s.

    They are not differences of cumulative sums, which would round more.
    """
    size = x.shape[-1]
    sums = x[..., None].expand(*x.shape, size).tril(-1).cumsum(-2)
    future = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    return sums.masked_fill(future, float("-inf"))
