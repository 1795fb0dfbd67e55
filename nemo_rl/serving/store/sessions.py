"""Keep the sessions of clients, with their sampling sessions.

    sessions/<id>.jsonl    one record for the session, then one for each sampling session, and one for its end

Invariant: a session belongs to one user, and ids of sessions never contain what a path could not.
"""

import re
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.serving.interfaces import RequestError
from nemo_rl.serving.store.journal import Journal

_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class SamplingSession:
    """Sampling session: what its requests sample from."""

    id: str
    """Id, `<session>:sample:<n>`."""
    number: int
    """Number within the session."""
    base_model: str
    """Name of the base model, as clients write it."""
    model_path: str | None = None
    """Path of the checkpoint, or None for the base model and for weights without a name."""
    has_folder: bool = False
    """Whether the session's folder has an adapter for it. Else, the base model samples."""

    @property
    def session_id(self) -> str:
        """The session to which it belongs."""
        return self.id.split(":")[0]


@dataclass(eq=False)
class ClientSession:
    """Session of a client."""

    id: str
    """Id of the session."""
    owner: str
    """Name of the user."""
    created_at: float
    """Time of its start in seconds since 1970."""
    details: dict[str, Any]
    """Tags, metadata, name and project, as the client gave them."""
    retry_key: str = ""
    """Text that is equal for repeated requests to make the session."""
    samplers: dict[int, SamplingSession] = field(default_factory=dict)
    """Sampling sessions by their number."""
    finished: dict[str, Any] | None = None
    """Reason and detail of its end, or None if it goes on."""
    seen_at: float = field(default_factory=time.time)
    """Time of the last heartbeat or request."""

    def require_open(self) -> None:
        """Raise a `RequestError` if the session has ended."""
        if self.finished is not None:
            raise RequestError(f"The session {self.id} has ended. Make a new ServiceClient.")


class SessionStore:
    """Sessions in a folder.

    Args:
        folder: made if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._sessions = {
            session.id: session for session in map(_read_session, sorted(folder.glob("*.jsonl"))) if session
        }
        self._by_retry = {(each.owner, each.retry_key): each for each in self._sessions.values() if each.retry_key}

    def create(self, owner: str, details: dict[str, Any], retry_key: str) -> ClientSession:
        """Make a session, or return the one that an earlier request with the same retry key has made."""
        known = self._by_retry.get((owner, retry_key))
        if retry_key and known is not None:
            return known
        session = ClientSession(secrets.token_hex(16), owner, time.time(), details, retry_key)
        first = {"owner": owner, "created_at": session.created_at, "details": details, "retry_key": retry_key}
        self._journal(session.id).append(first)
        self._sessions[session.id] = session
        self._by_retry[owner, retry_key] = session
        return session

    def get(self, session_id: str) -> ClientSession | None:
        """Return a session, or None if there is no such one."""
        return self._sessions.get(session_id)

    def of(self, owner: str) -> list[ClientSession]:
        """Return the sessions of a user, the newest first."""
        own = [session for session in self._sessions.values() if session.owner == owner]
        return sorted(own, key=lambda session: (session.created_at, session.id), reverse=True)

    def all(self) -> list[ClientSession]:
        """Return the sessions of all users."""
        return list(self._sessions.values())

    def finish(self, session: ClientSession, reason: dict[str, Any]) -> None:
        """Note the end of a session. Only the first reason counts."""
        if session.finished is None:
            self._journal(session.id).append({"finished": reason})
            session.finished = reason

    def add_sampler(self, session: ClientSession, sampler: SamplingSession) -> None:
        """Note a sampling session."""
        fields = {key: getattr(sampler, key) for key in ("number", "base_model", "model_path", "has_folder")}
        self._journal(session.id).append({"sampler": fields})
        session.samplers[sampler.number] = sampler

    def _journal(self, session_id: str) -> Journal:
        return Journal(self._folder / f"{session_id}.jsonl")


def sampler_id(session_id: str, number: int) -> str:
    """Return the id of a sampling session."""
    return f"{session_id}:sample:{number}"


def _read_session(path: Path) -> ClientSession | None:
    records = Journal(path).read()
    if not records or not _ID.fullmatch(path.stem):
        return None  # the process was killed before the first line was whole
    first, *others = records
    session = ClientSession(path.stem, first["owner"], first["created_at"], first["details"], first["retry_key"])
    for record in others:
        if "sampler" in record:
            number = record["sampler"]["number"]
            session.samplers[number] = SamplingSession(sampler_id(session.id, number), **record["sampler"])
        if "finished" in record:
            session.finished = record["finished"]
    return session
