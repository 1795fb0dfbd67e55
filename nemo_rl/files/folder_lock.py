"""A lock on a folder, so that two runs never write into the same place.

A POSIX record lock: the kernel drops it when the process ends, however it ends, and children made by fork do not
inherit it. Holding it is the permission to delete leftovers.
"""

import errno
import fcntl
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

_LOCK_FILE = ".writer.lock"


class FolderLock:
    """The right of one process to write below a folder.

    Within a process the lock does not exclude: use one owner per folder there.

    Args:
        folder: the folder; it need not exist yet.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return self._descriptor is not None

    def acquire(self) -> bool:
        """Take the lock without waiting; returns whether it is held now.

        False where another process holds it, and where the folder is missing or read-only. A file system
        without locks is trusted: there the answer is True, with a warning.
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
            logger.warning("%s cannot be locked (%s); make sure that one run uses it.", self._folder, error)
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
