"""Provide rules of low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) that all training backends use.

This module selects the layers that a section names, draws the first values of A, and checks that adapters train and
reach the engines. Invariant: results depend on the layers' names and the run's seed, not on how ranks divide the model.
"""

import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_rl.config import LoraConfig
from nemo_rl.utils.errors import ConfigError, WeightSyncError
from nemo_rl.utils.seed import derive_seed

ADAPTER_PARAMETERS = ("lora_A", "lora_B")


def select_layers(available: Sequence[str], targets: Sequence[str], excluded: Sequence[str], section: str) -> list[str]:
    """Select the layers that a section names, in model order.

    A pattern is a full name, the last parts of a name (`q_proj`, `self_attn.q_proj`), or a name with wildcards
    (`*.layers.0.*`).

    Args:
        available: Names of the layers that can be adapted.
        targets: Patterns of layers to adapt. If empty, all layers.
        excluded: Patterns of layers that are not adapted.
        section: Dotted name of the section, for messages.

    Raises:
        ConfigError: A pattern matches no layer, or no layer is left.
    """
    for key, patterns in (("target_modules", targets), ("exclude_modules", excluded)):
        for pattern in patterns:
            if not any(_matches(name, pattern) for name in available):
                raise ConfigError(f"{section}.{key}: {pattern!r} matches no layer. {_listed(available)}")
    chosen = [
        name
        for name in available
        if any(_matches(name, pattern) for pattern in targets or ["*"])
        and not any(_matches(name, pattern) for pattern in excluded)
    ]
    if not chosen:
        raise ConfigError(f"{section} adapts no layer, so nothing would be trained. {_listed(available)}")
    return chosen


def select_modules(available: Sequence[str], config: LoraConfig, section: str) -> list[str]:
    """Return the layers that a section `lora_cfg` selects, in model order (`select_layers`)."""
    targets = [] if config.match_all_linear else config.target_modules
    return select_layers(available, targets, config.exclude_modules, section)


def generator_of(seed: int, name: str) -> torch.Generator:
    """Make the generator of a layer's initial adapter values. It is the same on all ranks and at every start.

    Args:
        name: name of the layer in the whole model.
    """
    return torch.Generator().manual_seed(derive_seed(seed, "lora", name))


def initial_a(dim: int, inputs: int, method: str, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw the initial values of a whole A `[dim, inputs]`, on the CPU.

    Args:
        dim: rank of the adapter.
        inputs: number of the layer's inputs.
        method: `xavier` for Glorot's normal distribution, or `uniform` for U(-1/sqrt(inputs), 1/sqrt(inputs)).
    """
    a = torch.empty(dim, inputs, dtype=dtype)
    if method == "xavier":
        return nn.init.xavier_normal_(a, generator=generator)
    bound = 1 / math.sqrt(inputs)
    return nn.init.uniform_(a, -bound, bound, generator=generator)


@torch.no_grad()
def merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Compute `W + scaling B A` as a new tensor in the dtype of W `[out, in]`, in at least float32."""
    exact = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(exact), b.to(exact), a.to(exact), alpha=scaling).to(weight.dtype)


@contextmanager
def adapters_off(adapters: Iterable[Any]) -> Iterator[None]:
    """Run a block with only the base model.

    Args:
        adapters: all adapters, with their attribute `active`.
    """
    switched = list(adapters)
    for adapter in switched:
        adapter.active = False
    try:
        yield
    finally:
        for adapter in switched:
            adapter.active = True


def require_moved(changed: Mapping[str, int], section: str) -> None:
    """Check, after the first update with a gradient, that every adapter changes its layer.

    B starts at zero. If it stays zero, the model's code bypasses the layer, and the run would silently train less than
    configured.

    Args:
        changed: Number of nonzero values in B, by the name of the layer in the whole model.
        section: Dotted name of the section, for the message.

    Raises:
        ConfigError: Some adapters still have a B of zero. The message names them.
    """
    still = [name for name, count in changed.items() if count == 0]
    if still:
        raise ConfigError(
            f"{len(still)} of {len(changed)} LoRA adapters received no gradient in the first update, so they "
            f"would never reach the generated text: {', '.join(still[:8])}{', ...' if len(still) > 8 else ''}. "
            "The model does not call these layers, or calls them only for some tokens: name them in "
            f"{section}.exclude_modules."
        )


def require_on_some_rank(arrives: bool, device: torch.device, section: str) -> None:
    """Check that an exported weight differed from the base on at least one rank. The call is collective.

    Raises:
        WeightSyncError: it differed on no rank.
    """
    seen = torch.tensor([int(arrives)], device=device)
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    if not seen.item():
        raise WeightSyncError(
            "LoRA adapters were trained, but all weights sent are those of the base model: generation would "
            "never see the training. If the learning rate is so small that adding the adapters changes no "
            f"weight in policy.precision, raise it or {section}.alpha."
        )


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or name.endswith(f".{pattern}")


def _listed(available: Sequence[str]) -> str:
    """List the layer names that a pattern can contain: the last part of each, with an example of a full name."""
    kinds = sorted({name.rpartition(".")[2] for name in available})
    if not kinds:
        return "The model has no linear layers besides its output head."
    return (
        f"Linear layers of the model: {', '.join(kinds)} (in full, for example {available[0]}); never the output head."
    )
