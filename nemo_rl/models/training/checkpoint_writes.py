"""Prepare the parts of a checkpoint before they are written, with copies if training continues during the write.

Invariant: a `Write` writes the state as it was at preparation, provided that `Keep` copied it.
"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

type Keep = Callable[[str, Tensor], Tensor]
"""Maps a name and its tensor to the tensor to write: itself, or a copy that later updates do not change."""
type Write = Callable[[dist.ProcessGroup | None], None]
"""Writes a prepared part of a checkpoint; ranks synchronise in the process group, None is the default one."""


def as_it_is(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor itself, for a part that is written immediately."""
    return tensor
