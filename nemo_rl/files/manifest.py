"""Store the checksums of a folder's files, and find files that have changed since.

CRC-32 detects disk errors and interrupted copies (1.4 GiB/s per thread, several files at a time); it does not protect
against deliberate changes. Invariant: the manifest is the last file written into a folder.
"""

import json
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nemo_rl.files.regular_file import open_regular, read_text
from nemo_rl.files.writing import write_atomically
from nemo_rl.utils.errors import CheckpointError

MANIFEST_FILE = "manifest.json"
_CHUNK_BYTES = 8 << 20
_THREADS = min(8, os.cpu_count() or 1)


def write_manifest(folder: Path) -> None:
    """Store size and checksum of every file below a folder as `manifest.json` in it."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    described = _describe(folder, [name for name in names if name != MANIFEST_FILE])
    _write(folder, described)


def replace_file(folder: Path, name: str, text: str) -> None:
    """Replace a file in a folder with or without a manifest, and keep the folder undamaged at each moment.

    A crash before the end leaves a manifest without this file, which then counts as unchecked.

    Raises:
        CheckpointError: the manifest cannot be read.
    """
    files = _read(folder)
    if files is None:
        write_atomically(folder / name, text)
        return
    others = {other: entry for other, entry in files.items() if other != name}
    _write(folder, others)
    write_atomically(folder / name, text)
    _write(folder, others | dict(_describe(folder, [name])))


def _write(folder: Path, files: Mapping[str, Any]) -> None:
    write_atomically(folder / MANIFEST_FILE, json.dumps({"checksum": "crc32", "files": files}, indent=1))


def manifest_bytes(folder: Path) -> int | None:
    """Return the total size of the files in a folder's manifest, or None without a readable manifest."""
    try:
        files = _read(folder)
    except CheckpointError:
        return None
    return None if files is None else sum(entry["bytes"] for entry in files.values())


def find_damage(folder: Path, below: str = "") -> list[str] | None:
    """List the files that differ from the manifest, each with the difference, or return None without a manifest.

    Files that are not in the manifest are ignored.

    Args:
        folder: folder that `write_manifest` described.
        below: check only files whose names start with this text.

    Raises:
        CheckpointError: the manifest cannot be read.
    """
    expected = _read(folder)
    if expected is None:
        return None
    expected = {name: entry for name, entry in expected.items() if name.startswith(below)}
    present = [name for name in expected if (folder / name).is_file()]
    found = _describe(folder, [name for name in present if _size(folder / name) == expected[name]["bytes"]])
    damage = []
    for name, entry in expected.items():
        if name not in present:
            damage.append(f"{name} is missing")
        elif name not in found:
            damage.append(f"{name} has {_size(folder / name)} of {entry['bytes']} bytes")
        elif found[name]["crc32"] != entry["crc32"]:
            damage.append(f"{name} has other content than was written (checksum)")
    return damage


def _read(folder: Path) -> dict[str, Any] | None:
    path = folder / MANIFEST_FILE
    if not path.exists():
        return None
    try:
        files = json.loads(read_text(path))["files"]
        return {name: {"bytes": int(entry["bytes"]), "crc32": str(entry["crc32"])} for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}).") from error


def _describe(folder: Path, names: list[str]) -> Mapping[str, dict[str, Any]]:
    """Return size and checksum of each file, starting with the largest files."""
    order = sorted(names, key=lambda name: -_size(folder / name))
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = dict(zip(order, pool.map(lambda name: _crc32(folder / name), order), strict=True))
    return {name: {"bytes": _size(folder / name), "crc32": sums[name]} for name in names}


def _size(path: Path) -> int:
    return path.stat().st_size


def _crc32(path: Path) -> str:
    value = 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open_regular(path) as file:
        while count := file.readinto(buffer):
            value = zlib.crc32(buffer[:count], value)
    return f"{value:08x}"
