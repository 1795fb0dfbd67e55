"""Read files that others may have put into a folder, and refuse all but regular files.

A named pipe, a socket or a terminal would keep its reader waiting forever, and a device has no end. Invariant: nothing
here waits for another process, for any kind of file.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from io import BufferedReader

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}
_REFUSED_IN_FOLDERS = (stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK)
_MOST_FILES = 100_000


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file, or a link to one, for reading bytes.

    Raises:
        OSError: the path does not exist, cannot be read, or is not a regular file.
    """
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check(os.fstat(opened).st_mode, path)
        return open(opened, "rb")
    except OSError:
        os.close(opened)
        raise


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Read a regular file, and raise the errors of `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def read_text(path: str | os.PathLike[str]) -> str:
    r"""Read a regular file as UTF-8 text whose lines end with `\n`.

    Raises:
        OSError: as `open_regular`.
        UnicodeDecodeError: the file is not UTF-8 text.
    """
    return read_bytes(path).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def require_regular(path: str | os.PathLike[str]) -> None:
    """Refuse a path that exists and is no regular file, before a library opens it.

    Raises:
        OSError: the path is something else.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    _check(mode, path)


def require_regular_files(folder: str | os.PathLike[str], suffixes: Iterable[str] = ()) -> None:
    """Refuse a folder that has pipes, sockets or devices, before a library opens its files by their names.

    Args:
        folder: the folder, with everything below it; a folder that does not exist is accepted.
        suffixes: ends of the names of files to check. If empty, all files are checked.

    Raises:
        OSError: a path in it is neither a regular file nor a folder.
    """
    ends = tuple(suffixes)
    for number, path in enumerate(_files_below(str(folder))):
        if number >= _MOST_FILES:
            return
        if not ends or path.endswith(ends):
            try:
                mode = os.stat(path).st_mode
            except OSError:  # a link that leads nowhere
                continue
            if stat.S_IFMT(mode) in _REFUSED_IN_FOLDERS:
                _check(mode, path)


def _files_below(folder: str) -> Iterator[str]:
    for place, _, names in os.walk(folder):
        yield from (os.path.join(place, name) for name in names)


def _check(mode: int, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "It is a folder, and a file is needed", os.fspath(path))
        raise OSError(
            errno.EINVAL, f"It is {kind}, and only regular files are read; remove or replace it", os.fspath(path)
        )
