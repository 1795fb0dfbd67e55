"""Lock folders, so that two runs never write into one, and make private folders where other users may also write."""

import errno
import fcntl
import logging
import os
import stat
from pathlib import Path

from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)

LOCK_FILE = ".writer.lock"
"""Name of the locked file in a folder. It stays when the lock is released."""


class FolderLock:
    """A lock that allows one process to write below a folder.

    The lock does not exclude other locks of the same process, so a process must use one lock for each folder.

    Args:
        folder: the folder, which may be missing.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """True if this object holds the lock."""
        return self._descriptor is not None

    def acquire(self) -> bool:
        """Take the lock without waiting, and return whether this object now holds it.

        The result is False if another process holds the lock, or if the folder is missing or read-only. On a file
        system without locks the result is True, with a warning.
        """
        if self.is_held:
            return True
        try:
            descriptor = os.open(self._folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return False
        except OSError as error:
            if error.errno == errno.EROFS:
                return False
            raise
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                os.close(descriptor)
                return False
            logger.warning("%s cannot be locked (%s); make sure that only one run uses it.", self._folder, error)
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_ROOT = 0
_USER_MAP, _OVERFLOW_UID = Path("/proc/self/uid_map"), Path("/proc/sys/kernel/overflowuid")
_WHOLE_MAP = ["0", "0", "4294967295"]


def require_own(folder: Path, advice: str) -> Path:
    """Create a folder for this user alone (mode 0700), or check an existing one.

    An existing folder of this user that others may read is made private. An existing folder to which others may write
    is refused, because its content may be theirs.

    Args:
        folder: the folder; missing parents are created too.
        advice: last sentence of the error: what to do instead.

    Raises:
        ConfigError: it is a link or not a folder, belongs to another user, or others may write to it or replace it.
    """
    folder = Path(os.path.realpath(folder.parent)) / folder.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    for above in folder.parents:
        _require_kept(above, folder, advice)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        problem = _problem(found)
        if problem:
            raise ConfigError(f"{folder} {problem}. Delete it if it is not yours to keep. {advice}") from None
        if stat.S_IMODE(found.st_mode) != 0o700:
            folder.chmod(0o700)
    return folder


def is_shared(folder: Path) -> bool:
    """Return whether a folder is below a place like `/tmp`, where all users may write but not delete others' files."""
    shared = stat.S_IWOTH | stat.S_ISVTX
    return any(above.exists() and above.stat().st_mode & shared == shared for above in folder.absolute().parents)


def _problem(found: os.stat_result) -> str | None:
    """Describe why an existing path is not this user's own folder, or return None if it is."""
    if stat.S_ISLNK(found.st_mode):
        return "is a symbolic link"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    if found.st_uid != os.geteuid():
        return f"belongs to another user (uid {found.st_uid}; this process has {os.geteuid()})"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"may be written to by others (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def _require_kept(above: Path, folder: Path, advice: str) -> None:
    """Refuse a parent folder in which others may replace files they do not own."""
    found = above.stat()
    mode, trusted = stat.S_IMODE(found.st_mode), _trusted_owners()
    others_write = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and found.st_uid not in trusted)
    if found.st_uid not in trusted:
        problem = f"{above} belongs to another user (uid {found.st_uid}), who may replace what is in it"
    elif others_write and not mode & stat.S_ISVTX:
        problem = f"others may replace what is in {above} (mode {mode:04o}, no sticky bit)"
    else:
        return
    raise ConfigError(f"{folder} is not safe: {problem}. {advice}")


def _trusted_owners() -> set[int]:
    """Return the uids of this user and root, and in a user namespace also the overflow uid (host's root)."""
    trusted = {os.geteuid(), _ROOT}
    try:
        if _USER_MAP.read_text().split() != _WHOLE_MAP:
            trusted.add(int(_OVERFLOW_UID.read_text()))
    except OSError:
        return trusted  # the system is not Linux
    return trusted
