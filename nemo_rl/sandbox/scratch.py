"""Measure and remove a scratch folder that a program filled, even if its folders are deeply nested.

This is needed only if programs share the machine's files. Otherwise the folder is in memory and ends with a program.
"""

import contextlib
import os
import stat
import uuid
from collections.abc import Iterable


def is_beyond(folder: str, max_bytes: int, max_files: int) -> bool:
    """Return whether a folder holds more bytes or files than allowed, or cannot be listed completely."""
    num_bytes, num_files = 0, 0
    try:
        for place, folders, names in os.walk(folder, onerror=_raise):
            num_files += len(folders) + len(names)
            num_bytes += sum(_bytes_of(os.path.join(place, name)) for name in names)
            if num_bytes > max_bytes or num_files > max_files:
                return True
    except FileNotFoundError:  # a folder that the program has just removed
        return False
    except OSError:  # for example, the path is too long
        return True
    return False


def remove(folder: str) -> None:
    """Remove a folder and everything below it.

    Nested folders are moved up first, because recursion and the length of paths limit the depth that can be reached.
    """
    pending = [folder]
    while pending:
        place = pending.pop()
        os.chmod(place, 0o700)
        inner = []
        for entry in list(os.scandir(place)):
            if entry.is_dir(follow_symlinks=False):
                moved = f"{folder}-{uuid.uuid4().hex}"
                os.chmod(entry.path, 0o700)
                os.rename(entry.path, moved)
                inner.append(moved)
            else:
                os.unlink(entry.path)
        os.rmdir(place)
        pending += inner


def _bytes_of(path: str) -> int:
    try:
        return os.lstat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def _raise(error: OSError) -> None:
    raise error


def read_file(folder: str | int, name: str, max_bytes: int) -> bytes | None:
    """Read a file that a program left in its scratch folder, or return None if it cannot be read.

    Links, pipes and files above `max_bytes` are not read. A link could lead to a file that the program could not read.

    Args:
        folder: path or descriptor of the folder.
        name: name of the file, without folders.

    Raises:
        FileNotFoundError: there is no file with this name.
    """
    opened = folder if isinstance(folder, int) else os.open(folder, os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(name, flags, dir_fd=opened), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            content = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError:
        return None
    finally:
        if not isinstance(folder, int):
            os.close(opened)
    return content if len(content) <= max_bytes else None


def read_files(folder: str | int, names: Iterable[str], max_bytes: int) -> dict[str, bytes | None]:
    """Read files as `read_file` does, and leave out files that do not exist."""
    contents: dict[str, bytes | None] = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            contents[name] = read_file(folder, name, max_bytes)
    return contents
