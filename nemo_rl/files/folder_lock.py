"""Lock a folder, so that two runs never write into it.

It is a POSIX record lock: the kernel releases it when the process ends, for whatever reason, and children made by fork
do not inherit it. Only the holder may delete leftovers.
"""

import errno
import fcntl
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

_LOCK_FILE = ".writer.lock"


class FolderLock:
    """A lock that allows one process to write below a folder.

    It does not exclude other locks of the same process: use one owner per folder there.

    Args:
        folder: the folder; it need not exist yet.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """True if this object holds the lock."""
        return self._descriptor is not None

    def acquire(self) -> bool:
        """Take the lock without waiting; return whether it is held now.

        False if another process holds it, or if the folder is missing or read-only. On a file system
        without locks the result is True, with a warning.
        """
        if self.is_held:
            return True
        try:
            descriptor = os.open(self._folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
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
