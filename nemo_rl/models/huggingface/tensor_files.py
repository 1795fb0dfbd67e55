"""Find, download, read and write the safetensors files of models.

Invariant: only requested parts of tensors are read, at the time of the request. Files are memory-mapped, so they use
the page cache and not the process's memory.
"""

import json
import logging
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from nemo_rl.distributed.ranks.tensor_block import TensorBlock, whole_block
from nemo_rl.files import hub_download as hub
from nemo_rl.files.regular_file import read_text, require_regular
from nemo_rl.host.waiting_log import StillWaiting
from nemo_rl.utils.addresses import cluster_address
from nemo_rl.utils.errors import CheckpointError

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in the headers of safetensors files."""
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_ALIGNMENT = 8
_TOKENIZER_CONFIG = "tokenizer_config.json"

MAX_FILE_BYTES = 5 * 1024**3
"""Largest total size of the tensors in a file of a model folder. A larger tensor is in a file of its own."""


class TensorFiles:
    """Read the tensors of several files by name.

    Args:
        files: safetensors files. If several files have a tensor of the same name, the last file is used.
        file_of: the file of each tensor, from an index (`indexed_files`). A file is then opened only when one of its
            tensors is requested, which reduces the load of a shared disk. If None, all files are opened.

    Raises:
        CheckpointError: a file is damaged. If files are opened later, methods raise this error.
    """

    def __init__(self, files: Iterable[Path], file_of: Mapping[str, Path] | None = None) -> None:
        self.file_of: dict[str, Path] = dict(file_of or {})
        """The file of each tensor."""
        self._slices: dict[str, Any] = {}
        if file_of is None:
            for file in files:
                self._slices |= (held := _slices_in(file))
                self.file_of |= dict.fromkeys(held, file)
        self._names = list(self.file_of)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def _slice(self, name: str) -> Any:
        if name not in self._slices:
            file = self.file_of[name]
            held = _slices_in(file)
            if name not in held:
                raise CheckpointError(f"{file} has no {name}, which {SAFE_WEIGHTS_INDEX_NAME} says is in it.")
            self._slices |= {found: part for found, part in held.items() if self.file_of.get(found) == file}
        return self._slices[name]

    def like(self, name: str) -> Tensor:
        """Return a tensor on the meta device with the shape and dtype of a stored tensor.

        Raises:
            CheckpointError: the dtype is not one of `DTYPE_NAMES`.
        """
        found = self._slice(name)
        if found.get_dtype() not in _DTYPES:
            raise CheckpointError(
                f"{self.file_of[name]}: {name} is in a number format unknown here: {found.get_dtype()}."
            )
        return torch.empty(found.get_shape(), dtype=_DTYPES[found.get_dtype()], device="meta")

    def read(self, name: str, block: TensorBlock | None = None) -> Tensor:
        """Read a tensor, or a non-empty block of it, to the CPU."""
        return self._slice(name)[block.slices if block is not None and block.shape else ...]

    def equal(self, name: str, other: str, rows: int = 1024) -> bool:
        """Return whether two tensors are equal. At most `rows` rows of each are in memory at a time."""
        ours, theirs = self.like(name), self.like(other)
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return False
        if ours.dim() == 0:
            return torch.equal(self.read(name), self.read(other))
        rest = whole_block(ours.shape[1:])
        starts = range(0, len(ours), rows)
        blocks = [TensorBlock((start, *rest.starts), (min(rows, len(ours) - start), *rest.shape)) for start in starts]
        return all(torch.equal(self.read(name, block), self.read(other, block)) for block in blocks)


def _slices_in(file: Path) -> dict[str, Any]:
    """Open a file, and return its tensors by name. Values are read later."""
    try:
        require_regular(file)
        opened = safe_open(file, framework="pt")
        return {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (not a mapping)
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged: {error}.") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from error


def indexed_files(folder: Path) -> dict[str, Path] | None:
    """Return the file of each tensor from a model folder's index, or None if the weights are in one file."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if (folder / SAFE_WEIGHTS_NAME).exists() or not index.exists():
        return None
    return {name: folder / file for name, file in _weight_map(index).items()}


def model_folder(model_name: str) -> Path:
    """Return the folder of a model's files. A hub id is downloaded if it is not in the cache.

    Only the weight files that `weight_files` returns are downloaded. No request is sent to the hub for a cached model.
    If several processes share a cache, only one of them sends requests.

    Raises:
        DownloadError: the files cannot be downloaded.
    """
    path = Path(model_name).expanduser()
    if path.is_dir():
        return path
    cached = cached_folder(model_name)
    if cached is not None:
        return cached
    repository, commit = hub.pinned(model_name) or (model_name, None)
    if commit is not None:
        hub.described_source(model_name)  # with the model's own code
    with hub.one_download(repository):
        cached = cached_folder(model_name)  # another process may have downloaded it since
        if cached is not None:
            return cached
        folder = hub.download(repository, hub.DESCRIBING_FILES, ignored=hub.SUBFOLDERS, revision=commit)
        names = {SAFE_WEIGHTS_NAME} | _indexed(folder / SAFE_WEIGHTS_INDEX_NAME)
        # # The folder has the name of the commit, and the weights must be from the same commit.
        return hub.download(repository, sorted(names), revision=folder.name)


def cached_folder(hub_id: str) -> Path | None:
    """Return the cache folder of a hub model, with or without a commit in its name, or None.

    The result is None if configuration, tokenizer or weights are not in the cache.
    """
    tokenizer, config = (hub.cached_file(hub_id, name) for name in (_TOKENIZER_CONFIG, CONFIG_NAME))
    if tokenizer is None or config is None:
        return None
    folder = config.parent
    try:
        weight_files(folder)
    except CheckpointError:
        return None
    return folder


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder that `from_pretrained` would read.

    Raises:
        CheckpointError: the folder has no safetensors files, or a file that the index names does not exist.
    """
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    names = {SAFE_WEIGHTS_NAME}
    if not (folder / SAFE_WEIGHTS_NAME).exists() and index.exists():
        names = _indexed(index)
    absent = sorted(name for name in names if not (folder / name).is_file())
    if absent:
        raise CheckpointError(
            f"{str(folder)!r} has no {absent[0]}. Weights are read from {SAFE_WEIGHTS_NAME}, or from the files that "
            f"{SAFE_WEIGHTS_INDEX_NAME} names; other formats have to be converted to safetensors first."
        )
    return [folder / name for name in sorted(names)]


def _indexed(index: Path) -> set[str]:
    """Return the names of the files in an index, or an empty set without an index."""
    return set(_weight_map(index).values()) if index.exists() else set()


def _weight_map(index: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(read_text(index))["weight_map"]
    return found


def header_bytes(described: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> bytes:
    """Return the header of a safetensors file that holds the described tensors in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in described.items():
        start, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def write_index(folder: Path, file_of: Mapping[str, str], num_bytes: int) -> None:
    """Write the index that maps tensors to files of a folder, in the format of `transformers`."""
    content = {"metadata": {"total_size": num_bytes}, "weight_map": dict(file_of)}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def file_names(num_bytes: Mapping[str, int], max_bytes: int = MAX_FILE_BYTES) -> dict[str, str]:
    """Assign each tensor to a file, in order, with at most `max_bytes` per file."""
    numbers, number, filled = {}, 1, 0
    for name, size in num_bytes.items():
        if filled and filled + size > max_bytes:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += size
    return {name: f"model-{mine:05d}-of-{number:05d}.safetensors" for name, mine in numbers.items()}


def write_file(file: Path, likes: Mapping[str, Tensor], tensors: Iterator[tuple[str, Tensor]]) -> Iterator[None]:
    """Write one safetensors file, and yield after each tensor.

    Args:
        likes: shape and dtype of the file's tensors, in order.
        tensors: names and values of the tensors, on the CPU, in the same order. Tensors of other files may follow.
    """
    with file.open("wb") as stream:
        stream.write(header_bytes({name: (like.dtype, like.shape) for name, like in likes.items()}))
        for name, like in likes.items():
            found, tensor = next(tensors)
            same = (found, tensor.dtype, tensor.shape) == (name, like.dtype, like.shape)
            assert same, f"{found} where {name} belongs"
            stream.write(raw_bytes(tensor.contiguous()))
            yield


def write_model_files(
    folder: Path,
    likes: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    max_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the weight files and the index of a model folder, with one tensor in memory at a time.

    Args:
        folder: an existing folder.
        likes: shape and dtype of every tensor, in order.
        tensors: names and values of the tensors, on the CPU, in the same order.
        max_bytes: largest size in bytes of the tensors in a file.
    """
    file_of = file_names({name: like.nbytes for name, like in likes.items()}, max_bytes)
    arriving, written = iter(tensors), 0
    with StillWaiting(f"the writing of {folder}", "tensors are written", lambda: written, len(likes)) as progress:
        for file in dict.fromkeys(file_of.values()):
            mine = {name: like for name, like in likes.items() if file_of[name] == file}
            for _ in write_file(folder / file, mine, arriving):
                written += 1
                progress.look()
    write_index(folder, file_of, sum(like.nbytes for like in likes.values()))


logger = logging.getLogger(__name__)


def download_models(names: Iterable[str]) -> None:
    """Download models from the hub into this machine's cache, if the run uses only this machine.

    In a joined cluster, the ranks download the files that they need, because they may run on other machines.

    Args:
        names: hub ids, or folders, for which nothing is done.

    Raises:
        DownloadError: the files of a model cannot be downloaded.
    """
    hub_ids = [name for name in dict.fromkeys(names) if not Path(name).expanduser().is_dir()]
    address = cluster_address()
    if address is None:
        for name in hub_ids:
            model_folder(name)
        return
    absent = [name for name in hub_ids if cached_folder(name) is None]
    if absent:
        logger.info(
            "Machines of the cluster at %s that do not have %s download it by themselves; the logs of their ranks "
            "count the megabytes.",
            address,
            " and ".join(absent),
        )
