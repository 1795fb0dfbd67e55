"""Find weights and gradients that hold NaN or infinity.

Invariant: a check costs one pass over the memory, no copy of it, and one transfer from each device, whatever the number
of tensors.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl.distributed.ranks.placements import held_here
from nemo_rl.utils.errors import NonFiniteError

ANOTHER_COPY = "Take another copy of the model."
_MOST_NAMES = 8


@torch.no_grad()
def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that hold NaN or infinity.

    Args:
        tensors: tensors of any shape and dtype, on any device; of a DTensor this rank's part is checked. Tensors that
            are empty, on the meta device, of integers or in an 8-bit format are skipped.
    """
    looked_at = {name: held_here(tensor) for name, tensor in tensors.items()}
    looked_at = {name: tensor for name, tensor in looked_at.items() if _may_not_be_finite(tensor)}
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in looked_at.items():
        by_device.setdefault(tensor.device, []).append(name)
    found = []
    for names in by_device.values():
        # The extremes are NaN if any value is; `isfinite` would need memory for its result.
        extremes = torch.stack([torch.stack(torch.aminmax(looked_at[name])).float() for name in names])
        finite = extremes.isfinite().all(dim=1).tolist()
        found += [name for name, is_finite in zip(names, finite, strict=True) if not is_finite]
    return found


def _may_not_be_finite(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel() > 0 and not tensor.is_meta


def on_all_ranks(names: list[str]) -> list[str]:
    """Return the names found on any rank, in the order of ranks; collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return names
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, names)
    return list(dict.fromkeys(name for of_rank in found for name in of_rank))


def require_finite(tensors: Mapping[str, Tensor], whose: str, advice: str) -> None:
    """Refuse weights that are not finite.

    Raises:
        NonFiniteError: some are not; the message names them.
    """
    names = not_finite(tensors)
    if names:
        raise NonFiniteError(f"The weights of {whose} are not finite: {listed(names)}. {advice}")


def listed(names: Iterable[str]) -> str:
    """Join the first few names, and say how many more there are."""
    given = list(names)
    more = len(given) - _MOST_NAMES
    return ", ".join(given[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
