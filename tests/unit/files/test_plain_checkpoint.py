"""Checkpoints with planted code are refused by name and execute nothing; valid ones load bit for bit."""

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from nemo_rl.files.safe_checkpoint import METADATA_FILE, only_plain_values, read_metadata
from nemo_rl.files.safe_load import load_plain
from nemo_rl.models.megatron.checkpoints.folder import SavedTensors
from nemo_rl.utils.errors import CheckpointError

pytestmark = pytest.mark.fast

STATE = {"weights": {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1.5], dtype=torch.bfloat16)}, "step": 7}


class Bomb:
    """Writes a marker file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save(STATE, checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    return tmp_path / "saved"


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "executed"


def _load(folder: Path) -> dict[str, Any]:
    read_metadata(folder / METADATA_FILE)
    state = {"weights": {name: torch.zeros_like(value) for name, value in STATE["weights"].items()}, "step": 0}
    with only_plain_values():
        dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    return state


def _refusal(folder: Path) -> str:
    """Load a checkpoint, which must fail; return the reason."""
    with pytest.raises((CheckpointError, dcp.CheckpointException)) as caught:
        _load(folder)
    if isinstance(caught.value, CheckpointError):
        return str(caught.value)
    (reason, _), *_ = caught.value.failures.values()
    assert isinstance(reason, CheckpointError), reason
    return str(reason)


def _replace_object(folder: Path, name: str, value: Any) -> None:
    """Replace an object of the folder by another one."""
    found: Metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    content = io.BytesIO()
    torch.save(value, content)
    (folder / "planted.distcp").write_bytes(content.getvalue())
    found.storage_data[MetadataIndex(name)] = _StorageInfo("planted.distcp", 0, len(content.getvalue()), None)
    (folder / METADATA_FILE).write_bytes(pickle.dumps(found))


def test_a_valid_checkpoint_loads_bit_for_bit(folder):
    loaded = _load(folder)
    assert loaded["step"] == 7
    assert all(torch.equal(loaded["weights"][name], value) for name, value in STATE["weights"].items())
    own, torchs = read_metadata(folder / METADATA_FILE), pickle.loads((folder / METADATA_FILE).read_bytes())
    torchs.storage_meta.checkpoint_id = PurePosixPath(torchs.storage_meta.checkpoint_id)
    assert own == torchs


def test_the_readers_of_torch_are_restored_afterwards(folder, marker):
    _replace_object(folder, "step", Bomb(marker))
    usual = dcp.FileSystemReader.read_metadata
    _refusal(folder)
    assert dcp.FileSystemReader.read_metadata is usual


def test_code_in_the_metadata_is_refused(folder, marker):
    (folder / METADATA_FILE).write_bytes(pickle.dumps(Bomb(marker)))
    assert f"{folder}/.metadata is refused: it names posix.system" in _refusal(folder)
    with pytest.raises(CheckpointError, match=r"\.metadata is refused: it names posix\.system"):
        SavedTensors(folder)
    assert not marker.exists()


def test_code_deep_in_otherwise_valid_metadata_is_refused(folder, marker):
    found: Metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    found.storage_meta.modules = [Bomb(marker)]
    (folder / METADATA_FILE).write_bytes(pickle.dumps(found))
    assert "posix.system" in _refusal(folder)
    assert not marker.exists()


@pytest.mark.parametrize("call", ["builtins eval", "builtins getattr", "torch load", "nt system", "os path.join"])
def test_unlisted_names_are_refused(folder, call):
    (folder / METADATA_FILE).write_bytes(f"c{call.replace(' ', chr(10))}\n.".encode())
    with pytest.raises(CheckpointError, match=f"it names {call.replace(' ', '.')}"):
        read_metadata(folder / METADATA_FILE)


def test_code_in_an_object_between_the_tensors_is_refused(folder, marker):
    _replace_object(folder, "step", Bomb(marker))
    assert "planted.distcp" in (said := _refusal(folder))
    assert "it names posix.system" in said
    assert not marker.exists()


def test_a_tensor_declared_as_an_object_is_refused(folder, marker):
    """The metadata decides which of torch's two ways a value is read."""
    found: Metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    found.state_dict_metadata["weights.a"] = BytesStorageMetadata()
    (folder / METADATA_FILE).write_bytes(pickle.dumps(found))
    _replace_object(folder, "weights.a", Bomb(marker))
    assert "posix.system" in _refusal(folder)
    assert not marker.exists()


def test_code_in_the_place_of_a_tensor_is_refused(folder, marker):
    data = next(folder.glob("__*.distcp"))
    content = io.BytesIO()
    torch.save(Bomb(marker), content)
    found: Metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    places = {index: _StorageInfo(data.name, 0, len(content.getvalue()), None) for index in found.storage_data}
    found.storage_data = places
    data.write_bytes(content.getvalue())
    (folder / METADATA_FILE).write_bytes(pickle.dumps(found))
    assert f"{folder / data.name} is refused" in _refusal(folder)
    with pytest.raises(CheckpointError, match=data.name):
        SavedTensors(folder).read(["weights.a"])
    assert not marker.exists()


@pytest.mark.parametrize("path", ["/etc/hostname", "../other/file", "a/../../b"])
def test_files_outside_the_folder_are_refused(folder, path):
    found: Metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    index = next(iter(found.storage_data))
    found.storage_data[index] = _StorageInfo(path, 0, 10, None)
    (folder / METADATA_FILE).write_bytes(pickle.dumps(found))
    assert "a file outside its folder" in _refusal(folder)


@pytest.mark.parametrize("content", [b"", b"\x80", b"no pickle", pickle.dumps({"a": 1}), b"\x80\x04\x95\xff"])
def test_damaged_metadata_is_named(folder, content):
    (folder / METADATA_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
        read_metadata(folder / METADATA_FILE)


@pytest.mark.parametrize("name", ["planted", "__eq__", "__init__"])
def test_metadata_cannot_change_the_classes_that_it_names(folder, name):
    """BUILD with a state of slots sets attributes of whatever is on the stack, even of a class."""
    described = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    slots = b"}(X" + len(name).to_bytes(4, "little") + name.encode() + described + b"u"
    (folder / METADATA_FILE).write_bytes(b"\x80\x02" + described + b"N" + slots + b"\x86b.")
    before = dict(vars(Metadata))
    with pytest.raises(CheckpointError, match=r"\.metadata is refused: it changes the class Metadata"):
        read_metadata(folder / METADATA_FILE)
    assert dict(vars(Metadata)) == before


def test_a_pipe_or_folder_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, kind in (("pipe", "a named pipe"), ("folder", "a folder")):
        for read in (read_metadata, load_plain):
            with pytest.raises(CheckpointError, match=rf"{name} cannot be read.*It is {kind}"):
                read(tmp_path / name)


def test_every_flipped_byte_of_metadata_is_harmless(folder):
    """Any other content gives metadata or a CheckpointError, never another exception."""
    whole = (folder / METADATA_FILE).read_bytes()
    for position in range(0, len(whole), 7):
        for flip in (0x01, 0x80):
            changed = bytearray(whole)
            changed[position] ^= flip
            (folder / METADATA_FILE).write_bytes(changed)
            try:
                read_metadata(folder / METADATA_FILE)
            except CheckpointError:
                continue


def test_metadata_of_one_rank_is_read_equally_strictly(folder, marker):
    """Torch falls back to it if `.metadata` cannot be read."""
    (folder / "__0.metadata").write_bytes(pickle.dumps(Bomb(marker)))
    (folder / METADATA_FILE).unlink()
    with pytest.raises(dcp.CheckpointException), only_plain_values():
        dcp.load({"step": 0}, checkpoint_id=str(folder), no_dist=True)
    assert not marker.exists()


def test_a_plain_file_with_code_is_refused_whatever_the_environment_says(tmp_path, marker, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"state": Bomb(marker)}, tmp_path / "trainer.pt")
    with pytest.raises(CheckpointError, match=r"trainer\.pt is refused: it names posix\.system") as caught:
        load_plain(tmp_path / "trainer.pt")
    assert "weights_only" not in str(caught.value)
    assert not marker.exists()
