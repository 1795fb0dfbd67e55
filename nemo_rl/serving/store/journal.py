"""Keep records in a file to which lines of JSON are added.

Invariant: `append` returns when the line is with the operating system, so it survives the end of this process. A line
that was cut off is removed by the next `read`.
"""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl.serving.store.storage import storing
from nemo_rl.utils.errors import CheckpointError


class Journal:
    """Records in one file.

    Args:
        path: the file, whose folder exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record.

        Raises:
            StorageError: the record cannot be written. The file is as before.
        """
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        with storing(self.path.parent, len(line)):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                written = os.write(descriptor, line)
                if written != len(line):
                    # Only a full disk writes a part, which must not become the beginning of the next line.
                    os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(descriptor)

    def read(self) -> list[dict[str, Any]]:
        """Return all records, and remove an unfinished last line.

        Raises:
            CheckpointError: another line is no JSON object.
        """
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self.path, whole)
        records = []
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise CheckpointError(f"{self.path}, line {number}, is damaged: {error}. Restore the file.") from error
            records.append(record)
        return records


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file by a JSON object, so that a killed process leaves the old file or the new one.

    Raises:
        StorageError: the object cannot be written. The file is as before.
    """
    text, partial = json.dumps(content), path.with_name(path.name + ".partial")
    with storing(path.parent, len(text)):
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def read_json_file(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file.

    Raises:
        CheckpointError: the file is no JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}. Restore the file.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is damaged: it is no JSON object. Restore the file.")
    return found


def size_of(folder: Path) -> int:
    """Return the number of bytes of all files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def link_tree(source: Path, target: Path) -> None:
    """Make a folder with the files of another one, without copying them where the file system can link them.

    Raises:
        StorageError: a file cannot be written.
    """
    with storing(target, size_of(source)):
        target.mkdir(parents=True)
        for path in sorted(source.rglob("*")):
            copy = target / path.relative_to(source)
            if path.is_dir():
                copy.mkdir(exist_ok=True)
                continue
            try:
                os.link(path, copy)
            except OSError:
                copy.write_bytes(path.read_bytes())
