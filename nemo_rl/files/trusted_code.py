"""Decide which Python code in the folders of models may run in this process.

Code of a folder runs only if a configuration says so (`trust_code`), and only the files that were then in the folder:
each is known by the SHA-256 of its name and content. Workers get this list from the driver (`trusted_code`,
`accept_code`). So a copy of the folder, such as a checkpoint, may run the same code. A folder whose code was changed
since, or that differs on another machine, may not.

Invariants: without a call of `trust_code` or `accept_code`, no code of any folder runs; no environment variable changes
that. Code is never fetched from another repository than that of the model, and never from a branch, which may move.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_rl.files.regular_file import read_bytes, read_text
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)

_TRUSTED: set[str] = set()
"""SHA-256 of each file that may run, as in the values of `code_files`."""
_WARNED: set[str] = set()
_CODE = "*.py"
_ELSEWHERE = "--"
"""Mark of a class in another repository: `owner/name--module.Class`."""


ADVICE = "trust_remote_code=true in a model's section runs this code. Read it first: it gets all of your rights."


def is_refused(error: Exception) -> bool:
    """Return whether transformers raised an error because the code of a folder may not run."""
    return "trust_remote_code=True" in str(error)


def code_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the relative path and content of each Python file below a folder, by the path.

    Raises:
        OSError: a file cannot be read, or is not a regular file.
    """
    paths = sorted(path for path in folder.rglob(_CODE) if "__pycache__" not in path.parts)
    names = [path.relative_to(folder).as_posix() for path in paths]
    return {name: hashlib.sha256(f"{name}\0".encode() + read_bytes(folder / name)).hexdigest() for name in names}


def digest_of(files: Mapping[str, str]) -> str:
    """Return one SHA-256 of all files in a result of `code_files`, in hexadecimal."""
    return hashlib.sha256("".join(files[name] for name in sorted(files)).encode()).hexdigest()


def trust_code(key: str, name: str) -> None:
    """Let the code of a model's folder run in this process, and write a warning with its checksum.

    Args:
        key: configuration key that names the model, for messages.
        name: local folder, or `owner/name@COMMIT`, whose files are downloaded without the weights.

    Raises:
        ConfigError: the name is not a folder and has no full commit, or its code is in another repository.
        DownloadError: the files of the commit cannot be downloaded.
    """
    from nemo_rl.files.hub_download import pinned

    folder = Path(name).expanduser()
    if not folder.is_dir():
        if pinned(name) is None:
            raise ConfigError(
                f"{key}={name!r} with trust_remote_code=true: its code would run with your rights, and a branch of the "
                "hub may change at any time. Name a local folder, or a commit of 40 digits: owner/name@COMMIT "
                "(`hf download owner/name --revision COMMIT` also makes a folder)."
            )
        folder = _folder_of(name)
    files = code_files(folder)
    if not files:
        return
    _refuse_other_repositories(key, name, folder)
    if not _TRUSTED.issuperset(files.values()):
        logger.warning(
            "%s=%r: its Python code runs in all processes of this run, because trust_remote_code=true "
            "(sha256 %s of %s).",
            *(key, name, digest_of(files), ", ".join(files)),
        )
    _TRUSTED.update(files.values())


def _folder_of(name: str | Path) -> Path:
    # # The hub's library is imported here, because workers without models import this module.
    from nemo_rl.files.hub_download import described_source

    return Path(described_source(str(name))).expanduser()


def _refuse_other_repositories(key: str, name: str, folder: Path) -> None:
    for file, reference in _references(folder):
        if _ELSEWHERE in reference:
            raise ConfigError(
                f"{key}={name!r}: auto_map in {file} names {reference!r}, which is code of another repository at its "
                "newest commit. Copy this code into the folder, and name it there without what precedes `--`."
            )


def _references(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield name of the file and class of each entry of `auto_map` in the JSON files of a folder."""
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(read_text(path))
        except ValueError:  # the loader of this file reports it
            continue
        found: Any = content.get("auto_map") if isinstance(content, dict) else None
        for value in found.values() if isinstance(found, dict) else ():
            for reference in value if isinstance(value, list) else [value]:
                if isinstance(reference, str):
                    yield path.name, reference


def trusted_code() -> frozenset[str]:
    """Return the checksums of the files that may run here, for `accept_code` in a worker."""
    return frozenset(_TRUSTED)


def accept_code(checksums: Collection[str]) -> None:
    """Let files run that the driver trusts. Only a worker calls this, with what the driver sent."""
    _TRUSTED.update(checksums)


def may_run(name: str | Path) -> bool:
    """Return whether the code of a model's folder may run: it has code, and every file is trusted.

    Args:
        name: local folder, or `owner/name@COMMIT`. The code of other names never runs.
    """
    if not _TRUSTED:
        return False
    folder = _folder_of(name)
    files = code_files(folder) if folder.is_dir() else {}
    references = [reference for _, reference in _references(folder)] if files else []
    if not references or any(_ELSEWHERE in reference for reference in references):
        return False
    changed = [file for file, checksum in files.items() if checksum not in _TRUSTED]
    if changed and str(folder) not in _WARNED:
        _WARNED.add(str(folder))
        logger.warning(
            "The code in %s does not run: %s differs from the code that this run trusts, or no trust_remote_code=true "
            "belongs to it.",
            *(folder, ", ".join(changed)),
        )
    return not changed


def code_of(*names: str) -> dict[str, str]:
    """Return the code that a model and its tokenizer may run, as `code_files` of all of their folders together."""
    found: dict[str, str] = {}
    for name in names:
        if may_run(name):
            found |= code_files(_folder_of(name))
    return found


def copy_code(source: str | Path, target: Path) -> None:
    """Copy the code of a model into another folder if it may run, so that the other can be loaded in the same way."""
    if not may_run(source):
        return
    folder = _folder_of(source)
    for name in code_files(folder):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, target / name)
