"""What a backend prepares of a checkpoint before it is written: copies now where training goes on, bytes later.

Invariant: what a `Write` writes is what the state was when it was prepared, as far as `Keep` made copies of it.
"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

type Keep = Callable[[str, Tensor], Tensor]
"""What to write in a tensor's place, by its name: the tensor, or a copy that later updates leave alone."""
type Write = Callable[[dist.ProcessGroup | None], None]
"""Writes a prepared part of a checkpoint; ranks meet in the group, None is the default one."""


def as_it_is(name: str, tensor: Tensor) -> Tensor:
    """The tensor itself, for what is written at once."""
    return tensor
