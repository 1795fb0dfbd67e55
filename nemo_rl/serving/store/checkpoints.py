"""Keep named checkpoints of adapters.

    checkpoints/<model>/<kind>/<name>/checkpoint.json    what it is, and the folder with its files
                                     /data-<n>/          adapter, and state of the optimizer

Invariant: `checkpoint.json` names a whole folder. It is replaced after the folder was written, so a name has the old
files or the new ones at every moment.
"""

import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.serving.interfaces import RequestError
from nemo_rl.serving.store.journal import read_json_file, size_of, write_json
from nemo_rl.serving.store.storage import StorageError, storing

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Name of each kind in paths, and its type in lists."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@,-]{0,127}")
_PREFIX = "tinker://"


@dataclass(frozen=True)
class CheckpointPath:
    """Address of a checkpoint."""

    run: str
    """Id of the model."""
    kind: str
    """One of `KINDS`."""
    name: str
    """Name that the client has chosen."""

    def __str__(self) -> str:
        return f"{_PREFIX}{self.run}/{self.kind}/{self.name}"


@dataclass(frozen=True)
class CheckpointRecord:
    """Description of a checkpoint."""

    run: str
    """Id of the model that was saved."""
    kind: str
    """One of `KINDS`."""
    name: str
    """Name that the client has chosen."""
    owner: str
    """Name of the user."""
    seq_id: int
    """Number of the request that saved it."""
    base_model: str
    """Name of the base model, as the client wrote it."""
    spec: dict[str, Any]
    """Fields of `AdapterShape`."""
    created_at: float
    """Time in seconds since 1970."""
    expires_at: float | None = None
    """Time at which it is deleted, or None if it is kept."""
    user_metadata: dict[str, str] | None = None
    """Data of the user."""
    run_metadata: dict[str, Any] | None = None
    """Data of the user about the model."""
    data: str = ""
    """Name of the folder with its files."""
    size_bytes: int = 0
    """Size of its files."""

    @property
    def path(self) -> CheckpointPath:
        """Its address."""
        return CheckpointPath(self.run, self.kind, self.name)

    @property
    def has_expired(self) -> bool:
        """True if its time is over."""
        return self.expires_at is not None and self.expires_at <= time.time()


@dataclass(eq=False)
class CheckpointStore:
    """Checkpoints in a folder."""

    folder: Path
    """Folder, made if it is missing."""
    _known: dict[CheckpointPath, CheckpointRecord] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(self.folder.glob("*/*/*/checkpoint.json")):
            record = CheckpointRecord(**read_json_file(file))
            self._known[record.path] = record
            _remove_others(file.parent, record.data)

    def find(self, path: CheckpointPath) -> CheckpointRecord | None:
        """Return a checkpoint, or None if there is no such one or its time is over."""
        record = self._known.get(path)
        return None if record is None or record.has_expired else record

    def of(self, wanted: Callable[[CheckpointRecord], bool]) -> Iterator[CheckpointRecord]:
        """Yield the checkpoints that a function accepts, the newest first."""
        found = [record for record in self._known.values() if not record.has_expired and wanted(record)]
        yield from sorted(found, key=lambda record: (record.created_at, str(record.path)), reverse=True)

    def files_of(self, record: CheckpointRecord) -> Path:
        """Return the folder with the files of a checkpoint."""
        return self._place(record.path) / record.data

    def stored_bytes(self, owner: str) -> int:
        """Return the size of all checkpoints of a user."""
        return sum(record.size_bytes for record in self._known.values() if record.owner == owner)

    def new_folder(self, path: CheckpointPath, seq_id: int) -> Path:
        """Return a folder that does not exist, in which the files of a checkpoint may be written."""
        place = self._place(path)
        with storing(place):
            place.mkdir(parents=True, exist_ok=True)
        folder = place / f"data-{seq_id}"
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def add(self, record: CheckpointRecord, folder: Path) -> CheckpointRecord:
        """Make a folder with files the checkpoint of its name, and remove the one that it replaces.

        Raises:
            StorageError: the record cannot be written. The folder is removed.
        """
        whole = CheckpointRecord(**{**asdict(record), "data": folder.name, "size_bytes": size_of(folder)})
        try:
            write_json(folder.parent / "checkpoint.json", asdict(whole))
        except StorageError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._known[whole.path] = whole
        _remove_others(folder.parent, folder.name)
        return whole

    def change_expiry(self, record: CheckpointRecord, expires_at: float | None) -> None:
        """Change the time at which a checkpoint is deleted."""
        changed = CheckpointRecord(**{**asdict(record), "expires_at": expires_at})
        write_json(self._place(record.path) / "checkpoint.json", asdict(changed))
        self._known[record.path] = changed

    def delete(self, path: CheckpointPath) -> None:
        """Delete a checkpoint. Sampling sessions that were made from it have its files still."""
        if self._known.pop(path, None) is not None:
            place = self._place(path)
            (place / "checkpoint.json").unlink(missing_ok=True)
            shutil.rmtree(place, ignore_errors=True)

    def delete_expired(self) -> int:
        """Delete the checkpoints whose time is over, and return their number."""
        expired = [path for path, record in self._known.items() if record.has_expired]
        for path in expired:
            self.delete(path)
        return len(expired)

    def _place(self, path: CheckpointPath) -> Path:
        return self.folder / path.run.replace(":", "-") / path.kind / path.name


def checked_name(name: str) -> str:
    """Return the name of a checkpoint, or raise a `RequestError` if it cannot be one."""
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"The name {name[:80]!r} cannot be used. A name has 1 to 128 letters, digits or any of ._+=@,- and begins "
            "with a letter, a digit or _."
        )
    return name


def parse_path(text: str) -> CheckpointPath:
    """Return the parts of an address.

    Raises:
        RequestError: it is no address of a checkpoint.
    """
    parts = text.removeprefix(_PREFIX).split("/")
    if not text.startswith(_PREFIX) or len(parts) != 3 or parts[1] not in KINDS or not parts[0]:
        raise RequestError(
            f"{text[:200]!r} is no path of a checkpoint. Write tinker://RUN_ID/KIND/NAME, with KIND one of "
            f"{', '.join(KINDS)}."
        )
    return CheckpointPath(parts[0], parts[1], checked_name(parts[2]))


def _remove_others(place: Path, kept: str) -> None:
    """Remove folders of files that no checkpoint names any more."""
    for folder in place.glob("data-*"):
        if folder.name != kept:
            shutil.rmtree(folder, ignore_errors=True)
