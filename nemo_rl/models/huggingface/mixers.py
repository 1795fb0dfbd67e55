"""Describe which weights of a recurrent layer belong to which of its heads.

A mixer (Mamba, gated delta net, Kimi's delta attention, short convolution) consists of projections into channels, a
convolution and a scan that treat the channels of every head separately, and a projection back. Several projections are
fused, so the rows of one head are not next to each other: `in_proj` of Mamba-2 has the rows of z, x, B, C and dt.
A mixer is recognized by the names of its parts, which are the same in all architectures that use it.

Sources: Mamba (arXiv:2312.00752), Mamba-2 (arXiv:2405.21060, section 8), gated delta nets (arXiv:2412.06464), and the
classes of transformers.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.utils.errors import ConfigError

_KEY = "policy.dtensor_cfg"
_CONVOLUTIONS = ("conv1d", "conv")


@dataclass(frozen=True)
class HeadPart:
    """Channels, or numbers of heads, that belong to heads in equal and consecutive shares."""

    size: int
    """Number of channels."""
    heads: int
    """Number of heads or groups that share the channels."""
    shared: bool = False
    """Whether several heads use the channels of one group, so that several ranks may compute the same group."""

    def own(self, ranks: int) -> int:
        """Return how many channels one of `ranks` ranks needs."""
        return self.size // self.heads * max(1, self.heads // ranks)

    def divides(self, ranks: int) -> bool:
        """Return whether each rank can have the same number of whole heads, or one group together with others."""
        return self.heads % ranks == 0 or (self.shared and ranks % self.heads == 0)


type Parts = tuple[HeadPart, ...]
type Sizes = Mapping[str, Callable[[int], int]]


@dataclass(frozen=True)
class Mixer:
    """The weights of a recurrent layer, by names relative to it."""

    scanned: HeadPart
    """Heads of one call of the scan, or channels of a convolution without a scan."""
    columns: Mapping[str, Parts]
    """Linear layers, convolutions and parameters whose outputs or rows belong to heads: the parts of their rows."""
    out: str
    """Linear layer from the channels back to the hidden size."""
    products: int = 0
    """Number of multiplications of a token with the states of all heads, in the recurrent form (`sizes`)."""
    sums: tuple[str, ...] = ()
    """Linear layers from the channels to numbers that all heads use."""
    norms: Mapping[str, int] = field(default_factory=dict)
    """Norms over channels: number of groups of channels that are normalized separately."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """Axis of the heads in parameters where it is not the first one."""
    sizes: Sizes = field(default_factory=dict)
    """Attributes of the layer, or of one of its modules, that count channels or heads: function from the number of
    ranks to the value on each of them. Not every class has all of them."""


def find_mixers(hf: PreTrainedModel) -> dict[str, Mixer]:
    """Return the recurrent layers of a model by name. Only shapes are read, so weights may be on the meta device."""
    found = ((name, mixer_of(module)) for name, module in hf.named_modules())
    return {name: mixer for name, mixer in found if mixer is not None}


def require_whole_heads(hf: PreTrainedModel, tensor: int, context: int) -> None:
    """Check that ranks can divide the heads of all recurrent layers of a model.

    Args:
        hf: the whole model, with or without weights.
        tensor: number of tensor-parallel ranks, which divide heads and groups of heads.
        context: number of context-parallel ranks, which divide the heads that are left on a tensor-parallel rank.

    Raises:
        ConfigError: the ranks cannot divide them.
    """
    for name, mixer in find_mixers(hf).items():
        parts = {part: column for column, each in mixer.columns.items() for part in each}
        for part, column in parts.items():
            if not part.divides(tensor):
                fitting = max(size for size in range(1, tensor) if all(each.divides(size) for each in parts))
                raise ConfigError(
                    f"{_KEY}.tensor_parallel_size={tensor} does not divide the {part.heads} heads or groups of "
                    f"{name}.{column} of {type(hf).__name__}: {part.heads} / {tensor} = {part.heads / tensor:g}. "
                    f"The largest smaller size that does: {fitting}."
                )
        convolved = sum(part.own(tensor) for name in _CONVOLUTIONS for part in mixer.columns.get(name, ()))
        scanned = mixer.scanned.own(tensor)
        common = math.gcd(scanned, convolved)
        if common % context:
            fitting = max(size for size in range(1, context) if common % size == 0)
            raise ConfigError(
                f"{_KEY}.context_parallel_size={context} does not divide the {scanned} heads and "
                f"{convolved} convolved channels of a rank in {name} of {type(hf).__name__}. The largest smaller size "
                f"that does: {fitting}."
            )


def mixer_of(module: nn.Module) -> Mixer | None:
    """Return the description of a recurrent layer, or None for any other module."""
    names = {name for name, _ in (*module.named_children(), *module.named_parameters(recurse=False))}
    return next((describe(module) for needed, describe in _KINDS if needed <= names), None)


def _own(parts: Parts, ranks: int) -> int:
    return sum(part.own(ranks) for part in parts)


def _delta_net(mixer: Any) -> Mixer:
    """Describe a gated delta net, with fused projections (Qwen3-Next, Qwen3.5) or separate ones (OLMo-Hybrid)."""
    keys, values = HeadPart(mixer.key_dim, mixer.num_k_heads, shared=True), HeadPart(mixer.value_dim, mixer.num_v_heads)
    heads, key_heads = (
        HeadPart(mixer.num_v_heads, mixer.num_v_heads),
        HeadPart(mixer.num_k_heads, mixer.num_k_heads, shared=True),
    )
    channels = (keys, keys, values)
    known: dict[str, Parts] = {
        # # The rows of a key head are its q and k, and v and z of its value heads.
        "in_proj_qkvz": (HeadPart(2 * mixer.key_dim + 2 * mixer.value_dim, mixer.num_k_heads),),
        "in_proj_ba": (HeadPart(2 * mixer.num_v_heads, mixer.num_k_heads),),
        "in_proj_qkv": channels,
        **dict.fromkeys(("q_proj", "k_proj"), (keys,)),
        **dict.fromkeys(("in_proj_z", "v_proj", "g_proj"), (values,)),
        **dict.fromkeys(("in_proj_a", "in_proj_b", "a_proj", "b_proj", "A_log", "dt_bias"), (heads,)),
        "conv1d": channels,
    }
    sizes: Sizes = {
        "num_v_heads": heads.own,
        "num_k_heads": key_heads.own,
        "key_dim": keys.own,
        "value_dim": values.own,
        "conv_dim": partial(_own, channels),
    }
    columns = {name: parts for name, parts in known.items() if hasattr(mixer, name)}
    products = 3 * mixer.num_v_heads * mixer.head_k_dim * mixer.head_v_dim
    return Mixer(heads, columns, "out_proj" if hasattr(mixer, "out_proj") else "o_proj", products, sizes=sizes)


def _kimi_delta(mixer: Any) -> Mixer:
    """Describe Kimi's delta attention."""
    channels, heads = HeadPart(mixer.qkv_dim, mixer.num_heads), HeadPart(mixer.num_heads, mixer.num_heads)
    columns: dict[str, Parts] = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_b_proj"), (channels,)),
        **dict.fromkeys(("forget_gate.f_b_proj", "forget_gate.dt_bias"), (channels,)),
        **dict.fromkeys(("b_proj", "forget_gate.A_log"), (heads,)),
        "conv1d": (channels,) * 3,
    }
    sizes: Sizes = {"num_heads": heads.own, "qkv_dim": channels.own, "conv_dim": partial(_own, (channels,) * 3)}
    products = 3 * mixer.qkv_dim * mixer.head_dim
    return Mixer(heads, columns, "o_proj", products, axes={"forget_gate.A_log": 2}, sizes=sizes)


def _mamba_2(mixer: Any) -> Mixer:
    """Describe Mamba-2, whose heads share the B and C of their group."""
    states = HeadPart(mixer.n_groups * mixer.ssm_state_size, mixer.n_groups, shared=True)
    channels, heads = HeadPart(mixer.intermediate_size, mixer.num_heads), HeadPart(mixer.num_heads, mixer.num_heads)
    convolved = (channels, states, states)
    columns: dict[str, Parts] = {
        "in_proj": (channels, *convolved, heads),
        "conv1d": convolved,
        **dict.fromkeys(("A_log", "D", "dt_bias"), (heads,)),
    }
    groups = HeadPart(mixer.n_groups, mixer.n_groups, shared=True)
    sizes: Sizes = {
        "num_heads": heads.own,
        "n_groups": groups.own,
        "intermediate_size": channels.own,
        "conv_dim": partial(_own, convolved),
        "groups_time_state_size": states.own,
        "norm.n_groups": groups.own,
        "norm.group_size": lambda ranks: channels.own(ranks) // groups.own(ranks),
    }
    has_norm = next(mixer.norm.parameters(), None) is not None
    norms = {"norm": _groups_of_norm(mixer.norm, mixer.intermediate_size)} if has_norm else {}
    return Mixer(heads, columns, "out_proj", _products_of_mamba(mixer), norms=norms, sizes=sizes)


def _products_of_mamba(mixer: Any) -> int:
    products: int = 2 * mixer.intermediate_size * mixer.ssm_state_size
    return products


def _groups_of_norm(norm: Any, channels: int) -> int:
    groups: int = getattr(norm, "n_groups", None) or channels // getattr(norm, "group_size", channels)
    return groups


def _mamba_1(mixer: Any) -> Mixer:
    """Describe Mamba, whose channels are independent except for dt, B and C."""
    channels = HeadPart(mixer.intermediate_size, mixer.intermediate_size)
    columns: dict[str, Parts] = {
        "in_proj": (channels, channels),
        **dict.fromkeys(("conv1d", "dt_proj", "A_log", "D"), (channels,)),
    }
    sizes: Sizes = {"intermediate_size": channels.own}
    return Mixer(channels, columns, "out_proj", _products_of_mamba(mixer), sums=("x_proj",), sizes=sizes)


def _mamba_1_of_heads(mixer: Any) -> Mixer:
    """Describe Zamba's Mamba, whose heads have their own dt, B and C and are scanned one after another."""
    channels, heads = (HeadPart(size, mixer.n_mamba_heads) for size in (mixer.intermediate_size, mixer.n_mamba_heads))
    columns: dict[str, Parts] = {
        "in_proj": (HeadPart(2 * mixer.intermediate_size, mixer.n_mamba_heads),),
        "conv1d": (channels,),
        **dict.fromkeys(("x_proj_weight", "dt_proj_weight", "dt_proj_bias", "A_log", "D"), (heads,)),
    }
    sizes: Sizes = {"intermediate_size": channels.own, "n_mamba_heads": heads.own}
    scanned = HeadPart(mixer.mamba_head_dim, 1, shared=True)
    return Mixer(scanned, columns, "out_proj", _products_of_mamba(mixer), sizes=sizes)


def _short_convolution(mixer: Any) -> Mixer:
    """Describe a short convolution with two gates (LFM2)."""
    channels = HeadPart(mixer.out_proj.in_features, mixer.out_proj.in_features)
    return Mixer(channels, {"in_proj": (channels,) * 3, "conv": (channels,)}, "out_proj")


_KINDS: tuple[tuple[set[str], Callable[[nn.Module], Mixer]], ...] = (
    ({"forget_gate", "conv1d", "g_b_proj", "o_proj"}, _kimi_delta),
    ({"in_proj_qkvz", "in_proj_ba", "conv1d", "A_log", "out_proj"}, _delta_net),
    ({"in_proj_qkv", "in_proj_z", "conv1d", "A_log", "out_proj"}, _delta_net),
    ({"q_proj", "a_proj", "g_proj", "conv1d", "A_log", "o_proj"}, _delta_net),
    ({"in_proj", "x_proj", "dt_proj", "conv1d", "A_log", "D", "out_proj"}, _mamba_1),
    ({"in_proj", "x_proj_weight", "dt_proj_weight", "conv1d", "A_log", "D", "out_proj"}, _mamba_1_of_heads),
    ({"in_proj", "conv1d", "norm", "A_log", "D", "dt_bias", "out_proj"}, _mamba_2),
    ({"in_proj", "conv", "out_proj"}, _short_convolution),
)
"""Names of parts of a mixer -> function that describes it."""


def is_used_by_weight(name: str, module: nn.Module) -> bool:
    """Return whether the layer above a module computes with the module's weight instead of calling the module.

    These are the convolutions of recurrent layers, the projection of Mamba's time steps, and the router of LongCat.
    """
    return isinstance(module, nn.Conv1d) or name.endswith((".dt_proj", ".router.classifier"))


def set_own_sizes(module: nn.Module, mixer: Mixer, ranks: int) -> None:
    """Set the attributes of a recurrent layer that count channels or heads to those of one of `ranks` ranks."""
    for name, own in mixer.sizes.items():
        owner_name, _, attribute = name.rpartition(".")
        owner: Any = module.get_submodule(owner_name)
        if hasattr(owner, attribute):
            setattr(owner, attribute, own(ranks))
