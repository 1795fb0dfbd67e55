"""Refuse what is more than one user may have.

Invariant: a limit that passes by itself is answered with status 429, which clients repeat. One that the user has to
change is an error of the user, which ends the request at once.
"""

import time
from collections import Counter
from dataclasses import dataclass, field

from nemo_rl.config.schema.service import ServiceConfig
from nemo_rl.serving.interfaces import RequestError
from nemo_rl.serving.store.checkpoints import CheckpointStore
from nemo_rl.serving.store.sessions import SessionStore
from nemo_rl.serving.store.tenants import TenantStore


class RefusedError(Exception):
    """Raised if a request is answered with an error status.

    Args:
        status: HTTP status.
        message: text for the client.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class BusyError(RefusedError):
    """Raised if a request has to be repeated later."""

    def __init__(self, message: str) -> None:
        super().__init__(429, message)


@dataclass
class UserLimits:
    """Limits of each user."""

    config: ServiceConfig
    """The limits."""
    sessions: SessionStore
    """Sessions of all users."""
    tenants: TenantStore
    """Models of all users."""
    checkpoints: CheckpointStore
    """Checkpoints of all users."""
    waiting_samples: Counter[str] = field(default_factory=Counter)
    """Number of sequences of each user that wait or are being sampled."""

    def check_rank(self, rank: int) -> None:
        """Refuse an adapter that is too large."""
        if not 1 <= rank <= self.config.max_rank:
            raise RequestError(f"The rank {rank} is not allowed; it must be from 1 to {self.config.max_rank}.")

    def check_new_model(self, owner: str) -> None:
        """Refuse one model more than a user may train."""
        open_models = [each for each in self.tenants.of(owner) if self._is_open(each.session_id)]
        if len(open_models) >= self.config.max_models_per_key:
            raise RequestError(
                f"This key trains {len(open_models)} models, which is the limit (service.max_models_per_key). End a "
                "session with ServiceClient.close. Models of a client that is gone do not count after "
                f"{self.config.idle_s:g} s."
            )

    def check_queue(self, owner: str, num_bytes: int) -> None:
        """Let a user wait whose requests fill the queue."""
        queued = sum(tenant.queued_bytes for tenant in self.tenants.of(owner) if tenant.queued_bytes)
        most = int(self.config.max_queued_mb * 2**20)
        if queued and queued + num_bytes > most:
            raise BusyError(f"Requests of {queued} bytes of this key wait; {most} are allowed (service.max_queued_mb).")

    def check_samples(self, owner: str, number: int) -> None:
        """Let a user wait who samples too much at the same time."""
        most, waiting = self.config.max_queued_samples, self.waiting_samples[owner]
        if waiting and waiting + number > most:
            raise BusyError(f"{waiting} sequences of this key wait; {most} are allowed (service.max_queued_samples).")

    def check_stored(self, owner: str) -> None:
        """Refuse a further checkpoint of a user who has stored too much."""
        stored, most = self.checkpoints.stored_bytes(owner), int(self.config.max_stored_gb * 2**30)
        if stored >= most:
            raise RequestError(
                f"The checkpoints of this key have {stored} bytes; {most} are allowed (service.max_stored_gb). Delete "
                "some of them."
            )

    def _is_open(self, session_id: str) -> bool:
        session = self.sessions.get(session_id)
        if session is None or session.finished is not None:
            return False
        return time.time() - session.seen_at < self.config.idle_s
