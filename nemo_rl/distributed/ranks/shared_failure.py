"""Raise an error of one rank on all ranks, so that no rank waits for a stopped rank.

Invariant: after `raise_on_all_ranks` either every rank continues, or every rank has raised the same CheckpointError.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist
from safetensors import SafetensorError

from nemo_rl.utils.errors import CheckpointError

if TYPE_CHECKING:
    import torch.distributed.checkpoint as dcp


@contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Wait for all ranks. If any rank failed to write or read, raise an error on all of them.

    Args:
        group: process group over which the ranks exchange their errors; if None, the default group.

    Raises:
        CheckpointError: a rank failed. The message lists the errors of all ranks.
    """
    mine: str | None = None
    try:
        yield
    except CheckpointError as error:
        mine = str(error)
    except (OSError, RuntimeError, SafetensorError) as error:
        mine = f"{type(error).__name__}: {error}"
    except _checkpoint_exception() as error:
        mine = reasons_of(error)
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine, group=group)
    reasons = list(dict.fromkeys(reason for reason in found if reason is not None))
    if reasons:
        raise CheckpointError("; ".join(reasons))


def _checkpoint_exception() -> "type[dcp.CheckpointException]":
    """Import the exception only after an error, because the import is slow and the controller imports this file."""
    from torch.distributed.checkpoint import CheckpointException

    return CheckpointException


def require_readable(error: "dcp.CheckpointException") -> None:
    """Raise the CheckpointError of a rank that refused a file, if there is one. It names the cause best.

    Raises:
        CheckpointError: a rank refused a file.
    """
    refused = next((reason for reason, _ in error.failures.values() if isinstance(reason, CheckpointError)), None)
    if refused is not None:
        raise CheckpointError(str(refused)) from error


def reasons_of(error: "dcp.CheckpointException") -> str:
    """Return the ranks' errors without stacks. The caller chains the whole error as the cause."""
    return "; ".join(dict.fromkeys(f"{type(reason).__name__}: {reason}" for reason, _ in error.failures.values()))
