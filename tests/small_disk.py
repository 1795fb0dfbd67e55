"""Mount a file system of a few megabytes, to test what happens when it is full."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
_MOUNT = 'mount -t tmpfs -o size="$2" tmpfs "$1" && echo mounted && exec cat'


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount memory of `size` (`90m`) in the mount namespace of a helper process; others reach it through /proc.

    No other process has the mount, so nothing has to be unmounted.
    """
    command = [*_OWN_MOUNTS, _MOUNT, "sh", str(folder), size]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != "mounted\n":
            pytest.skip("this user may not mount a file system of its own")
        yield Path(f"/proc/{holder.pid}/root{folder}")
        holder.terminate()


def fill(disk: Path, leave_bytes: int) -> Path:
    """Write a file that leaves the given number of free bytes on a disk; return the file."""
    path = disk / "fill"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - leave_bytes)
    return path
