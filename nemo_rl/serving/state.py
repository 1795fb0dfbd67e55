"""Join the files of the service, and find in them what a user names.

Invariant: a user finds only what is the user's own.
"""

import re
import shutil
import time
from pathlib import Path

from nemo_rl.files.folders import FolderLock
from nemo_rl.serving.interfaces import RequestError
from nemo_rl.serving.limits import RefusedError
from nemo_rl.serving.promises import PromiseBook
from nemo_rl.serving.store.base import acquire_folder
from nemo_rl.serving.store.checkpoints import CheckpointRecord, CheckpointStore, parse_path
from nemo_rl.serving.store.sessions import ClientSession, SamplingSession, SessionStore
from nemo_rl.serving.store.storage import storing
from nemo_rl.serving.store.tenants import Tenant, TenantStore

_MODEL = re.compile(r"([0-9a-f]{32}):train:(\d{1,18})")
_SAMPLER = re.compile(r"([0-9a-f]{32}):sample:(\d{1,18})")
LOCK_S = 30.0
"""Time in seconds for which a process that is ending may hold the lock of a folder."""


class ServiceState:
    """Files and results of the service.

    Args:
        folder: made if it is missing.
        keep_results_s: time in seconds for which a result can be asked for again.

    Raises:
        ConfigError: another process uses the folder.
        StorageError: a folder cannot be made.
    """

    def __init__(self, folder: Path, keep_results_s: float) -> None:
        self.folder = folder
        self._lock = FolderLock(folder)
        with storing(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            acquire_folder(self._lock, folder, LOCK_S)
            self.sessions = SessionStore(folder / "sessions")
            self.tenants = TenantStore(folder / "models")
            self.checkpoints = CheckpointStore(folder / "checkpoints")
        self.promises = PromiseBook(keep_results_s)

    def release(self) -> None:
        """Let another process use the folder."""
        self._lock.release()

    def session(self, owner: str, session_id: str) -> ClientSession:
        """Return a session of a user.

        Raises:
            RefusedError: there is no such session, or it is another user's.
        """
        session = self.sessions.get(session_id)
        if session is None:
            raise RefusedError(404, f"There is no session {session_id[:80]!r}.")
        if session.owner != owner:
            raise RefusedError(403, f"The session {session_id} belongs to another key.")
        session.seen_at = time.time()
        return session

    def tenant(self, owner: str, model_id: str) -> Tenant:
        """Return a model of a user.

        Raises:
            RefusedError: there is no such model, or it is another user's.
        """
        found = _MODEL.fullmatch(model_id)
        if found is None:
            raise RefusedError(404, f"There is no model {model_id[:80]!r}.")
        self.session(owner, found[1])
        tenant = self.tenants.get(model_id)
        if tenant is None:
            raise RefusedError(404, f"There is no model {model_id!r}.")
        return tenant

    def sampler(self, owner: str, sampler_id: str) -> SamplingSession:
        """Return a sampling session of a user.

        Raises:
            RefusedError: there is no such sampling session, or it is another user's.
        """
        found = _SAMPLER.fullmatch(sampler_id)
        if found is None:
            raise RefusedError(404, f"There is no sampling session {sampler_id[:80]!r}.")
        sampler = self.session(owner, found[1]).samplers.get(int(found[2]))
        if sampler is None:
            raise RefusedError(404, f"There is no sampling session {sampler_id!r}.")
        return sampler

    def checkpoint(self, owner: str, path: str) -> CheckpointRecord:
        """Return a checkpoint of a user.

        Raises:
            RequestError: the path is none, or there is no such checkpoint.
            RefusedError: it is another user's.
        """
        record = self.checkpoints.find(parse_path(path))
        if record is None:
            raise RequestError(f"There is no checkpoint {path}, or its time is over.")
        if record.owner != owner:
            raise RefusedError(403, f"The checkpoint {path} belongs to another key.")
        return record

    def sampler_folder(self, sampler: SamplingSession) -> Path:
        """Return the folder for the adapter of a sampling session."""
        return self.folder / "samplers" / sampler.session_id / str(sampler.number)

    def new_sampler_folder(self, sampler: SamplingSession) -> Path:
        """Return the folder of a new sampling session, without what a killed process has left there.

        Raises:
            StorageError: the folder above it cannot be made.
        """
        folder = self.sampler_folder(sampler)
        shutil.rmtree(folder, ignore_errors=True)
        with storing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
        return folder

    def sample_file(self, sampler: SamplingSession, seq_id: int) -> Path:
        """Return the file for the body of a request to sample."""
        return self.folder / "samples" / sampler.session_id / str(sampler.number) / str(seq_id)

    def remove_samplers(self, session: ClientSession) -> None:
        """Remove the files of the sampling sessions of a session that has ended."""
        for part in ("samplers", "samples"):
            shutil.rmtree(self.folder / part / session.id, ignore_errors=True)
