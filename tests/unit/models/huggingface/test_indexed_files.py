"""Files of tensors that an index names are opened when one of their tensors is asked for."""

import pytest
import safetensors
import safetensors.torch
import torch

from nemo_rl.models.huggingface import tensor_files
from nemo_rl.models.huggingface.tensor_files import TensorFiles, indexed_files, weight_files, write_model_files
from nemo_rl.utils.errors import CheckpointError

LAYERS = {f"layer.{number}": torch.full((2,), float(number)) for number in range(4)}


def test_only_files_with_wanted_tensors_are_opened(tmp_path, monkeypatch):
    """A pipeline rank needs few of a large model's files, and a shared disk would see every rank open all."""
    write_model_files(tmp_path, LAYERS, LAYERS.items(), max_bytes=8)
    opened = []
    monkeypatch.setattr(
        tensor_files, "safe_open", lambda file, **kw: opened.append(file.name) or safetensors.safe_open(file, **kw)
    )
    tensors = TensorFiles(weight_files(tmp_path), indexed_files(tmp_path))
    assert list(tensors) == list(LAYERS) and opened == []
    assert tensors.read("layer.2").tolist() == [2.0, 2.0] and tensors.like("layer.2").shape == (2,)
    assert opened == ["model-00003-of-00004.safetensors"]
    assert list(TensorFiles(weight_files(tmp_path))) == list(LAYERS) and len(opened) == 1 + 4


def test_a_tensor_that_is_not_where_the_index_says_is_an_error(tmp_path):
    write_model_files(tmp_path, LAYERS, LAYERS.items(), max_bytes=8)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("layer.3", "layer.5"))
    with pytest.raises(CheckpointError, match=r"model-00004-of-00004.*has no layer\.5"):
        TensorFiles(weight_files(tmp_path), indexed_files(tmp_path)).read("layer.5")


def test_a_single_file_needs_no_index(tmp_path):
    safetensors.torch.save_file(LAYERS, tmp_path / "model.safetensors")
    assert indexed_files(tmp_path) is None
    assert sorted(TensorFiles(weight_files(tmp_path), indexed_files(tmp_path))) == sorted(LAYERS)
