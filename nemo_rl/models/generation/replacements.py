"""Start engines again in place of those that died, as often as the run allows it."""

import logging
from collections.abc import Callable

from nemo_rl.distributed.worker_groups import RayWorkerGroup
from nemo_rl.models.generation.members import Member, Speed
from nemo_rl.utils.errors import NodeLostError, ResourceInsufficientError, WorkerDiedError

logger = logging.getLogger(__name__)

_MOST_STARTS = 3
"""Starts of an engine that dies each time before it is ready."""


class Replacements:
    """Replaces engines and counts it.

    Args:
        workers: the workers of all engines.
        setup_timeout_s: seconds to wait for the start of an engine.
        most: engines that may be replaced in the run (`cluster.max_actor_restarts`).
    """

    def __init__(self, workers: RayWorkerGroup, setup_timeout_s: float, most: int) -> None:
        self.count = 0
        """Number of engines replaced so far."""
        self._workers = workers
        self._setup_timeout_s = setup_timeout_s
        self._most = most

    def replace(self, member: Member, reason: str, check: Callable[[], None]) -> None:
        """Start a new engine for a member, again if it dies while it starts.

        Args:
            member: the dead engine.
            reason: what happened to it.
            check: called before another start; raises if the engines are not needed any more.

        Raises:
            WorkerDiedError: the run's restarts are used up, or the engine died at each of `_MOST_STARTS` starts.
            ResourceInsufficientError: the engine's node was lost, and no other has room.
        """
        for num_left in reversed(range(_MOST_STARTS)):
            self._note(member, reason)
            try:
                self._workers.restart_workers(member.ranks, self._setup_timeout_s)
                break
            except ResourceInsufficientError as shortage:
                raise ResourceInsufficientError(f"{reason} {shortage}") from shortage
            except WorkerDiedError as death:
                if num_left == 0 or isinstance(death, NodeLostError):
                    raise
                reason = str(death)
                check()
        member.num_starts += 1
        member.speed = Speed()

    def _note(self, member: Member, reason: str) -> None:
        self.count += 1
        if self.count > self._most:
            raise WorkerDiedError(
                f"Generation engine {member.index} died and cluster.max_actor_restarts={self._most} restarts are used "
                f"up. {reason}"
            )
        logger.warning(
            "Generation engine %d died; restarting it (%d of %d) and re-issuing %d requests. %s",
            member.index,
            self.count,
            self._most,
            len(member.unfinished),
            reason.splitlines()[0],
        )
