"""Read torch distributed checkpoints (`.metadata`, `*.distcp`) without executing anything they contain.

torch reads `.metadata` with pickle and objects between the tensors with `torch.load(weights_only=False)`. Both run code
that the files name, and Megatron Core reads its folders through the same two functions. Invariant: within
`only_plain_values` a folder gives tensors, plain values and torch's own descriptions of them, or a CheckpointError.
"""

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from nemo_rl.files.regular_file import open_regular
from nemo_rl.files.safe_load import refusal
from nemo_rl.utils.errors import CheckpointError

METADATA_FILE = ".metadata"
_DESCRIPTIONS = (
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
    *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
_LAYOUTS = {str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)}
_DAMAGED = (
    *(pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError, RuntimeError),
    *(ArithmeticError, MemoryError),
)
"""Errors that unpickling arbitrary bytes raises."""


def _path(*parts: str) -> PurePath:
    """Make a path that fits any system, because the path where the checkpoint was written is not used here."""
    return PurePosixPath(*parts)


def _allowed() -> dict[tuple[str, str], Any]:
    """Map the (module, name) pairs that `.metadata` may name to the objects to use."""
    paths = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    return {
        **{("torch.distributed.checkpoint.metadata", name): getattr(metadata, name) for name in _DESCRIPTIONS},
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): _LAYOUTS.__getitem__,
        **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
        **{(module, name): _path for module in ("pathlib", "pathlib._local") for name in paths},
    }


_ALLOWED = _allowed()


class _Unpickler(pickle.Unpickler):
    """Unpickler that accepts only the classes of a checkpoint's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that the pickle names."""
        if (module, name) not in _ALLOWED:
            raise CheckpointError(f"it names {module}.{name}, which loading it would execute")
        return _ALLOWED[module, name]


@contextmanager
def _classes_as_they_are() -> Iterator[None]:
    """Undo and refuse changes of the classes that a pickle may name, because a pickle can set attributes of a class."""
    classes = [value for value in _ALLOWED.values() if isinstance(value, type) and value.__module__ != "torch"]
    before = [dict(vars(each)) for each in classes]
    try:
        yield
    finally:
        changed = [(each, own) for each, own in zip(classes, before, strict=True) if dict(vars(each)) != own]
        for each, own in changed:
            for name in vars(each).keys() - own.keys():
                delattr(each, name)
            for name in own:
                if vars(each).get(name) is not own[name]:
                    setattr(each, name, own[name])
    if changed:
        raise CheckpointError(f"it changes the class {changed[0][0].__name__}, which loading it would execute")


def read_metadata(file: Path) -> metadata.Metadata:
    """Read a `.metadata` file.

    Raises:
        CheckpointError: the file is missing or damaged, would execute code, or names files outside its folder.
    """
    try:
        with open_regular(file) as opened, _classes_as_they_are():
            found = _Unpickler(opened).load()
    except CheckpointError as error:
        raise CheckpointError(
            f"{file} is refused: {error}. No checkpoint of torch needs that: the file was changed, and nothing of its "
            "folder should be used."
        ) from error
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} does not exist: not a checkpoint, or an incomplete one.") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
    except _DAMAGED as error:
        raise CheckpointError(f"{file} is damaged ({type(error).__name__}: {error}).") from error
    for place in _places(found, file):
        path = PurePath(place)
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(f"{file} is refused: it names {place!r}, a file outside its folder.")
    return found


def _places(found: Any, file: Path) -> set[str]:
    """Return the files that hold the values."""
    described = found.__dict__ if isinstance(found, metadata.Metadata) else {}
    values, places = described.get("state_dict_metadata"), described.get("storage_data", {})
    kinds = (metadata.TensorStorageMetadata, metadata.BytesStorageMetadata)
    if (
        not isinstance(values, dict)
        or not isinstance(places, dict)
        or not all(isinstance(value, kinds) for value in values.values())
        or not all(isinstance(getattr(place, "relative_path", None), str) for place in places.values())
    ):
        raise CheckpointError(f"{file} is damaged: it holds no description of a checkpoint.")
    return {place.relative_path for place in places.values()}


def _read_metadata(self: FileSystemReader, *args: Any, rank: int | None = None, **kwargs: Any) -> metadata.Metadata:
    found = read_metadata(Path(self._get_metadata_path(rank)))
    if getattr(found, "storage_meta", None) is None:
        found.storage_meta = metadata.StorageMeta()
    found.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
    return found


def _load_bytes(self: DefaultLoadPlanner, read_item: ReadItem, value: BytesIO) -> None:
    """Load a value as torch's method does, but only if `torch.load` can read it without executing anything."""
    loaded, name = torch.load(value, weights_only=True), read_item.dest_index.fqn
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded


def _read_data(self: FileSystemReader, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
    """Read data as torch's method does, with the names of the files in the error."""
    try:
        return _READ_DATA(self, plan, planner)
    except pickle.UnpicklingError as error:
        files = sorted({str(self.storage_data[item.storage_index].relative_path) for item in plan.items})
        raise CheckpointError(f"{Path(self.path) / files[0]}{_others(files)} is refused: {refusal(error)}.") from error


def _others(files: list[str]) -> str:
    return f" (or {', '.join(files[1:5])})" if len(files) > 1 else ""


_READ_DATA = FileSystemReader.read_data
_READERS = (
    (FileSystemReader, "read_metadata", _read_metadata),
    (FileSystemReader, "read_data", _read_data),
    (DefaultLoadPlanner, "load_bytes", _load_bytes),
)
_TURN = threading.RLock()


@contextmanager
def only_plain_values() -> Iterator[None]:
    """Make torch's checkpoint readers, which Megatron Core calls too, refuse values that would execute code.

    The folder's metadata must be read with `read_metadata` first, because `torch.distributed.checkpoint.load` hides the
    reason if it cannot be read. Torch has no setting for this, so the context replaces three of its methods, in this
    process and for one thread at a time.
    """
    with _TURN:
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in _READERS]
        for owner, name, safe in _READERS:
            setattr(owner, name, safe)
        try:
            yield
        finally:
            for owner, name, usual in before:
                setattr(owner, name, usual)
