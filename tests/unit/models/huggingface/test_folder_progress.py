"""Copies of model folders and new ones: the same tensors, one after the other, each counted in the progress."""

import logging
import re
from pathlib import Path

import pytest
import torch
from pseudo_terminal import BAR, lines_of, on_terminal
from safetensors.torch import load_file, save_file

from nemo_rl.host import waiting_log
from nemo_rl.models.huggingface.folders import copy_model_folder
from nemo_rl.models.huggingface.tensor_files import write_model_files
from nemo_rl.utils.errors import CheckpointError

pytestmark = pytest.mark.fast

FIRST = {"a": torch.randn(7, 5), "ids": torch.arange(6), "scalar": torch.tensor(0.5)}
SECOND = {"b": torch.randn(3, 4, dtype=torch.float64), "empty": torch.zeros(0, 2)}
LINE = r"the writing of \S+ after \d+ s: (\d+) of (\d+) tensors are written"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(FIRST, folder / "model-1.safetensors", metadata={"format": "pt"})
    save_file(SECOND, folder / "model-2.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"dtype": "float32"}')
    return folder


@pytest.fixture
def each_look_is_a_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(waiting_log, "PERIOD_S", 0.0)
    caplog.set_level(logging.INFO, "nemo_rl")


def counts_of(text: str) -> list[tuple[int, int]]:
    return [(int(done), int(total)) for done, total in re.findall(LINE, text)]


@pytest.mark.usefixtures("each_look_is_a_line")
def test_a_copy_in_another_dtype_counts_each_tensor(model: Path, tmp_path: Path, caplog) -> None:
    copy_model_folder(model, tmp_path / "copy", torch.bfloat16)
    assert counts_of(caplog.text) == [(done, 5) for done in range(6)]  # the first file is config.json
    for file, tensors in (("model-1.safetensors", FIRST), ("model-2.safetensors", SECOND)):
        copied = load_file(tmp_path / "copy" / file)
        assert copied.keys() == tensors.keys()
        for name, tensor in tensors.items():
            wanted = tensor.bfloat16() if tensor.is_floating_point() else tensor
            assert copied[name].dtype == wanted.dtype and torch.equal(copied[name], wanted)


@pytest.mark.usefixtures("each_look_is_a_line")
def test_a_copy_bit_for_bit_counts_the_tensors_of_each_file(model: Path, tmp_path: Path, caplog) -> None:
    copy_model_folder(model, tmp_path / "copy")
    assert counts_of(caplog.text) == [(0, 5), (3, 5), (5, 5)]
    for file in model.iterdir():
        assert (tmp_path / "copy" / file.name).read_bytes() == file.read_bytes()


def test_a_damaged_file_is_named(model: Path, tmp_path: Path) -> None:
    (model / "model-2.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors is damaged"):
        copy_model_folder(model, tmp_path / "copy", torch.bfloat16)


@pytest.mark.usefixtures("each_look_is_a_line")
def test_new_files_count_each_tensor(tmp_path: Path, caplog) -> None:
    tensors = FIRST | SECOND
    write_model_files(tmp_path, tensors, iter(tensors.items()), max_bytes=100)
    assert counts_of(caplog.text) == [(done, 5) for done in range(1, 6)]
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 3
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)


def test_a_terminal_has_a_bar(model: Path, tmp_path: Path) -> None:
    program = f"""
import time
from pathlib import Path
import torch
from nemo_rl.host import waiting_log
from nemo_rl.models.huggingface import folders

waiting_log.SHOWN_AFTER_S, write = 0.0, folders.write_file

def slowly(*parts):
    for tensor in write(*parts):
        time.sleep(0.4)
        yield tensor

folders.write_file = slowly
folders.copy_model_folder(Path({str(model)!r}), Path({str(tmp_path / "copy")!r}), torch.bfloat16)
"""
    status, output = on_terminal(program=program, columns=160)
    assert status == 0, output
    assert any(re.search(r"[2-4]/5 0:00:0\d 0:0", line) for line in lines_of(output) if BAR in line), output
