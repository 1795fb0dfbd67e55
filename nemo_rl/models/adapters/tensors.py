"""Hold the matrices of an adapter, and draw their first values.

Invariant: first values depend on the seed and the layers' names and sizes only. They are equal on all ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl.distributed.parallel_logprobs.head import HeadUpdate
from nemo_rl.models.training.low_rank import ADAPTER_PARAMETERS, generator_of, initial_a
from nemo_rl.utils.errors import DataError

MLP_PARTS = ("mlp", "feed_forward", "ffn", "moe", "experts", "shared_expert", "shared_experts", "fc1", "fc2")
"""Parts of the names of modules that compute each token by itself. All other linear layers mix tokens."""


@dataclass(frozen=True)
class AdapterShape:
    """Rank, scale, layers and first values of an adapter."""

    rank: int = 32
    """Number of rows of A, and of columns of B."""
    alpha: float = 32.0
    """The product is scaled by `alpha / rank`."""
    seed: int = 0
    """Seed of the first values of A. B is 0, so a new adapter has no effect."""
    train_attn: bool = True
    """Whether linear layers of attention, or of other mixers of tokens, are adapted."""
    train_mlp: bool = True
    """Whether linear layers of feed-forward blocks and experts are adapted."""
    train_unembed: bool = True
    """Whether the output head is adapted."""

    @property
    def scaling(self) -> float:
        """Return the factor of the product."""
        return self.alpha / self.rank

    def adapts(self, name: str, head: str | None) -> bool:
        """Return whether a layer is adapted.

        Args:
            name: name of the layer.
            head: name of the output head, or None without one.
        """
        if name == head:
            return self.train_unembed
        return self.train_mlp if is_of_mlp(name) else self.train_attn


def is_of_mlp(name: str) -> bool:
    """Return whether a layer belongs to a feed-forward block or an expert, by its name."""
    return not set(MLP_PARTS).isdisjoint(name.split("."))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map `[..., in]` to `[..., out]` with one product of matrices.

    For more dimensions, torch may choose another kernel, with other last bits, if the weight is not trained.
    """
    return F.linear(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


@dataclass(frozen=True, eq=False)
class LowRankPair:
    """The two matrices of a layer: `scaling x A^T B^T` is added to its output."""

    a: Tensor
    """`[rank, in]`."""
    b: Tensor
    """`[out, rank]`."""
    scaling: float
    """Factor of the product."""

    def inner(self, x: Tensor) -> Tensor:
        """Return `scaling x A^T`, `[..., rank]`, in the dtype of x."""
        return linear(x, self.a.to(x.dtype)) * self.scaling

    def product(self, x: Tensor) -> Tensor:
        """Return `scaling x A^T B^T`, `[..., out]`, in the dtype of x."""
        return linear(self.inner(x), self.b.to(x.dtype))

    def added_to(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the output of a layer, `[..., out]`, with the product of its input x added."""
        return out + self.product(x)

    def of_head(self, hidden_KD: Tensor) -> HeadUpdate:
        """Return the update of an output head for some hidden states."""
        return HeadUpdate(self.inner(hidden_KD), self.b.to(hidden_KD.dtype))


@dataclass(frozen=True, eq=False)
class AdapterTensors:
    """An adapter."""

    shape: AdapterShape
    """Rank, scale and layers."""
    pairs: Mapping[str, LowRankPair]
    """The matrices of each adapted layer by its name in the Hugging Face model."""

    def parameters(self) -> dict[str, Tensor]:
        """Return A and B of each layer by their names `<layer>.lora_A` and `<layer>.lora_B`."""
        named: dict[str, Tensor] = {}
        for name, pair in self.pairs.items():
            named |= {f"{name}.{last}": value for last, value in zip(ADAPTER_PARAMETERS, (pair.a, pair.b), strict=True)}
        return named

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "AdapterTensors":
        """Return an adapter of the same shape with other matrices, named as in `parameters`."""
        a, b = ADAPTER_PARAMETERS
        pairs = {
            name: LowRankPair(parameters[f"{name}.{a}"], parameters[f"{name}.{b}"], pair.scaling)
            for name, pair in self.pairs.items()
        }
        return replace(self, pairs=pairs)

    def copied(self, device: torch.device | None = None) -> "AdapterTensors":
        """Return a copy without gradients, on another device if one is given."""
        return self.with_parameters(
            {name: value.detach().to(device or value.device, copy=True) for name, value in self.parameters().items()}
        )


def new_adapter(
    shape: AdapterShape, sizes: Mapping[str, tuple[int, int]], head: str | None, device: torch.device
) -> AdapterTensors:
    """Make an adapter in float32 that has no effect, because B is 0.

    Args:
        shape: rank, scale and layers.
        sizes: numbers of outputs and inputs of each layer that can be adapted.
        head: name of the output head among them, or None.
        device: device of the matrices.

    Raises:
        DataError: no layer is adapted, or the rank is not a positive number.
    """
    if shape.rank < 1:
        raise DataError(f"The rank of an adapter has to be at least 1, and rank={shape.rank} was given.")
    chosen = {name: size for name, size in sizes.items() if shape.adapts(name, head)}
    if not chosen:
        raise DataError("An adapter has to adapt some layers: set train_attn, train_mlp or train_unembed to true.")
    pairs = {}
    for name, (num_out, num_in) in chosen.items():
        a = initial_a(shape.rank, num_in, "uniform", torch.float32, generator_of(shape.seed, name))
        pairs[name] = LowRankPair(a.to(device), torch.zeros(num_out, shape.rank, device=device), shape.scaling)
    return AdapterTensors(shape, pairs)
