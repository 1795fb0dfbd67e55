"""Name the folder and the bytes of a write that fails, for example because the disk is full.

Invariant: every write of the service's files is in a block of `storing`. What was stored before a failed write stays.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.files.writing import write_atomically
from nemo_rl.host.capacity import free_bytes, readable_bytes
from nemo_rl.utils.errors import NemoRLError

logger = logging.getLogger(__name__)

_REPEATED_S = 60.0
"""Time in seconds after which a warning is repeated."""


class StorageError(NemoRLError, RuntimeError):
    """The service cannot write its files, with the folder, the bytes and the reason in the message."""


@contextmanager
def storing(folder: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Replace an error of the operating system in a block by a `StorageError`.

    Args:
        folder: to which the block writes.
        num_bytes: number of bytes that it writes, or None if it is not known.
    """
    try:
        yield
    except OSError as error:
        raise storage_error(folder, error.strerror or str(error), num_bytes) from error


def storage_error(folder: Path, reason: str, num_bytes: int | None = None) -> StorageError:
    """Return the error of a write that has failed (`storing`)."""
    needed = "" if num_bytes is None else f"{readable_bytes(num_bytes)} are needed and "
    return StorageError(
        f"The service cannot write to {folder}: {reason} ({needed}{readable_bytes(free_bytes(folder))} are free). Free "
        "space there."
    )


def store_bytes(path: Path, content: bytes) -> None:
    """Replace a file, whose folder is made if it is missing.

    Raises:
        StorageError: the file cannot be written.
    """
    with storing(path.parent, len(content)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)


@dataclass
class StorageWarnings:
    """Warnings about failed writes in the log, at most one in a minute."""

    last: str = ""
    """Text of the last error."""
    _told_at: float = -_REPEATED_S

    def tell(self, error: StorageError) -> None:
        """Log an error, unless another one was logged a short time ago."""
        now = time.monotonic()
        self.last = str(error)
        if now - self._told_at > _REPEATED_S:
            self._told_at = now
            logger.warning("%s", error)
