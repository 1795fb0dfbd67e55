"""End the processes of workers, and find out whether workers that depend on each other are lost.

Invariant: no question here waits longer than a few seconds, whatever state the processes are in.
"""

import logging
from collections.abc import Sequence

import ray

from nemo_rl.distributed.workers.logs import end_processes, stopped_among, wait_until_gone
from nemo_rl.distributed.workers.results import PendingCall, WorkerSlot, gather
from nemo_rl.utils.errors import DeadlineExceededError, WorkerDiedError

logger = logging.getLogger(__name__)

_KILL_S = 5.0
"""Seconds Ray may take to kill a process before this process sends SIGKILL, and seconds to wait after that."""
_SIGN_OF_LIFE_S = 3.0
"""Seconds that an idle worker may take to answer."""


def kill_workers(slots: Sequence[WorkerSlot]) -> bool:
    """End the processes of workers; return whether no process on this node is left."""
    if not ray.is_initialized():
        return True
    for slot in slots:
        ray.kill(slot.handle, no_restart=True)
    known = [slot.identity for slot in slots if slot.identity]
    left = wait_until_gone(known, timeout_s=_KILL_S)
    if left:
        end_processes(left)
        left = wait_until_gone(left, timeout_s=_KILL_S)
    for identity in left:
        logger.warning("%s was killed and is still running.", identity)
    return not left


def find_loss(slots: Sequence[WorkerSlot], *, silence_is_loss: bool) -> str | None:
    """Ask workers for a sign of life.

    Args:
        slots: workers that depend on each other.
        silence_is_loss: whether a worker that runs, but is too busy to answer, counts as lost.

    Returns:
        One line about a worker that is dead, stopped or (with `silence_is_loss`) silent; None if there is none.

    Raises:
        RayDiedError: the local Ray ended.
    """
    calls = [PendingCall(slot.handle.report_identity.remote(), slot) for slot in slots]
    try:
        gather(calls, slots, _SIGN_OF_LIFE_S, "sign of life")
    except WorkerDiedError as death:
        return first_line(death)
    except DeadlineExceededError as silence:
        is_stopped = bool(stopped_among([slot.identity for slot in slots if slot.identity]))
        return first_line(silence) if is_stopped or silence_is_loss else None
    return None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, which names the worker; logs and stacks follow it."""
    return str(error).partition("\n")[0]
