"""Weights leave training under the names and shapes of the hub, and come back bit for bit."""

import asyncio
from pathlib import Path

import pytest
import torch
from architectures import random_model
from policy_helpers import policy_config, process_group, run_ranks
from safetensors.torch import load_file
from tiny_models import make_char_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.checkpoints.model_files import weights_by_name
from nemo_rl.models.generation.hf import HfEngine
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.huggingface.checkpoint_names import in_checkpoint, in_memory
from nemo_rl.models.training.interfaces import CheckpointPaths
from nemo_rl.utils.errors import CheckpointError

CPU = torch.device("cpu")
CONVERTED = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "phimoe", "gpt_neox", "gpt_oss")
AN_EXPERT = "model.layers.0.block_sparse_moe.experts.3.w1.weight"


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def _backend(folder: Path) -> DTensorBackend:
    return DTensorBackend(policy_config(str(folder)), CPU, init_optimizer=False, init_reference_model=False)


@pytest.mark.parametrize("model_type", (*CONVERTED, "llama"))
def test_a_checkpoint_is_what_save_pretrained_writes(model_type, tmp_path) -> None:
    random_model(model_type).save_pretrained(tmp_path / "theirs")
    theirs = _tensors(tmp_path / "theirs")
    with process_group():
        backend = _backend(tmp_path / "theirs")
        before = {name: tensor.clone() for name, tensor in weights_by_name(backend.model.hf).items()}
        assert (theirs.keys() == before.keys()) is (model_type in ("llama", "gpt_oss"))
        _assert_equal(dict(backend.iterate_weights()), theirs)
        backend.save(CheckpointPaths(tmp_path))
        _assert_equal(_tensors(tmp_path / "model"), theirs)
        with torch.no_grad():
            for parameter in backend.model.hf.parameters():
                parameter.zero_()
        backend.load(CheckpointPaths(tmp_path))
        _assert_equal(weights_by_name(backend.model.hf), before)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values())
    _assert_equal(weights_by_name(model), before)


def test_names_in_memory_are_read_too_and_written_as_hub_names(tmp_path) -> None:
    """Folders that were written with fused experts, and models built without loading."""
    model = random_model("mixtral")
    own = weights_by_name(model)
    _assert_equal(dict(in_memory(model, own, own.__getitem__)), own)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in _tensors(tmp_path / "fused")
    for hf in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "fused")):
        written = dict(in_checkpoint(hf, weights_by_name(hf).items()))
        assert torch.equal(written[AN_EXPERT], own["model.layers.0.mlp.experts.gate_up_proj"][3, :96])


def _ranks_save_and_load(rank: int, world_size: int, name: str, folder: str) -> dict[str, Tensor]:
    backend = _backend(Path(name))
    backend.save(CheckpointPaths(Path(folder)))
    with torch.no_grad():
        for parameter in backend.model.parameters():
            parameter.zero_()
    backend.load(CheckpointPaths(Path(folder)))
    return {name: tensor.clone() for name, tensor in backend.iterate_weights()}


def test_ranks_share_the_writing_of_experts(tmp_path) -> None:
    random_model("mixtral").save_pretrained(tmp_path / "theirs")
    streams = run_ranks(_ranks_save_and_load, 3, str(tmp_path / "theirs"), str(tmp_path))
    theirs = _tensors(tmp_path / "theirs")
    _assert_equal(_tensors(tmp_path / "model"), theirs)
    for stream in streams:
        _assert_equal(stream, theirs)


def test_tensors_that_do_not_match_are_named(tmp_path) -> None:
    random_model("mixtral").save_pretrained(tmp_path / "small/model")
    random_model("mixtral", num_local_experts=2).save_pretrained(tmp_path / "fewer/model")
    random_model("mixtral", num_hidden_layers=3).save_pretrained(tmp_path / "deep")
    with process_group():
        backend = _backend(tmp_path / "deep")
        with pytest.raises(CheckpointError, match=r"does not fit MixtralForCausalLM: it lacks model\.layers\.2\."):
            backend.load(CheckpointPaths(tmp_path / "small"))
        with pytest.raises(CheckpointError, match=r"does not fit MixtralForCausalLM: model\.layers\.0\.mlp\.experts"):
            backend.load(CheckpointPaths(tmp_path / "fewer"))
        file = next((tmp_path / "small/model").glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:1000])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
            backend.load(CheckpointPaths(tmp_path / "small"))


def test_a_transformers_engine_loads_the_stream(tmp_path) -> None:
    for name, size in (("old", 0.1), ("new", 0.3)):
        random_model("mixtral", initializer_range=size).save_pretrained(tmp_path / name)
        make_char_tokenizer().save_pretrained(tmp_path / name)
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    engine = HfEngine(EngineSettings("hf", old, old, device="cpu", precision="float32", max_model_len=64))
    with process_group():
        stream = [(name, tensor.clone()) for name, tensor in _backend(Path(new)).iterate_weights()]

    async def update() -> list[str]:
        await engine.begin_weight_update()
        await engine.load_tensors(stream[:9])
        await engine.load_tensors(stream[9:])
        return await engine.finish_weight_update(1)

    assert asyncio.run(update()) == []
    _assert_equal(weights_by_name(engine._model), weights_by_name(AutoModelForCausalLM.from_pretrained(new)))
