"""An exported checkpoint is the trained model, in transformers and byte for byte."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from policy_helpers import policy_config, process_group
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from nemo_rl.files.manifest import write_manifest
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.checkpoints import model_files as checkpoint_io
from nemo_rl.models.dtensor.training_backend import DTensorTraining
from nemo_rl.models.training.interfaces import CheckpointPaths
from nemo_rl.utils.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[5]
TINY_CHAT = ROOT / "examples/assets/tiny-chat"
BACKEND = DTensorTraining()


def _converter():
    spec = importlib.util.spec_from_file_location("converter", ROOT / "examples/converters/convert_dcp_to_hf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _logprobs(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits.double().log_softmax(-1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, PreTrainedModel]:
    """Make a step folder written by the training backend, and return the model it was written from."""
    step = tmp_path_factory.mktemp("run") / "step_3"
    with process_group():
        backend = DTensorBackend(
            policy_config(str(TINY_CHAT)), torch.device("cpu"), init_optimizer=False, init_reference_model=False
        )
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in backend.model.hf.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        backend.save(CheckpointPaths(step / "policy/weights", None))
        weights = {name: tensor.clone() for name, tensor in backend.iterate_weights()}
    model = AutoModelForCausalLM.from_pretrained(TINY_CHAT, dtype=torch.float32).eval()
    model.load_state_dict(weights, strict=False)
    AutoTokenizer.from_pretrained(TINY_CHAT).save_pretrained(step / "policy/weights/model")
    (step / "config.yaml").write_text(f"policy:\n  model_name: {TINY_CHAT}\n  tokenizer:\n    name: {TINY_CHAT}\n")
    return step, model


@pytest.mark.parametrize("given", ["", "policy", "policy/weights", "policy/weights/model"])
def test_the_weights_are_found_from_any_folder_of_a_step(trained, given) -> None:
    step, _ = trained
    assert BACKEND.find_weights(step / given) == step / "policy/weights"


def test_the_command_exports_the_trained_model(trained, tmp_path, capsys) -> None:
    step, model = trained
    arguments = ["--config", str(step / "config.yaml"), "--dcp-ckpt-path", str(step / "policy/weights")]
    assert _converter().main([*arguments, "--hf-ckpt-path", str(tmp_path / "hf"), "--verify"]) == 0
    printed = capsys.readouterr().out
    assert float(printed.split("log-probabilities: ")[1]) <= 1e-6

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = torch.tensor([tokenizer("37+85=122 and so on")["input_ids"]])
    difference = (_logprobs(exported, ids) - _logprobs(model, ids)).abs().max()
    assert difference <= 1e-6
    untrained = AutoModelForCausalLM.from_pretrained(TINY_CHAT, dtype=torch.float32).eval()
    assert (_logprobs(untrained, ids) - _logprobs(model, ids)).abs().max() > 0.1
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(TINY_CHAT).chat_template


def test_a_damaged_export_is_noticed(trained, tmp_path) -> None:
    step, _ = trained
    weights = BACKEND.find_weights(step)
    BACKEND.export(weights, tmp_path / "hf")
    assert BACKEND.verify_export(weights, tmp_path / "hf").max_difference <= 1e-6
    file = next((tmp_path / "hf").glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if "down_proj" in name)
    tensors[name] = tensors[name] * 1.1
    save_file(tensors, file, metadata={"format": "pt"})
    assert BACKEND.verify_export(weights, tmp_path / "hf").max_difference > 1e-3


def test_damaged_weights_are_not_exported(trained, tmp_path) -> None:
    step = tmp_path / "step_3"
    shutil.copytree(trained[0], step)
    (step / "policy/optimizer").mkdir()
    (step / "policy/optimizer/trainer.pt").write_text("x")
    write_manifest(step)
    (step / "policy/optimizer/trainer.pt").unlink()
    BACKEND.export(BACKEND.find_weights(step), tmp_path / "hf")
    (file,) = (step / "policy/weights/model").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"policy/weights/model/{file.name} has other content than was written"):
        BACKEND.export(BACKEND.find_weights(step), tmp_path / "other")


def test_an_export_in_bfloat16_takes_half_the_bytes(trained, tmp_path) -> None:
    step, model = trained
    weights = BACKEND.find_weights(step)
    BACKEND.export(weights, tmp_path / "hf", dtype="bfloat16")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert exported.dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert torch.equal(exported.get_parameter(name), parameter.to(torch.bfloat16)), name
    assert 1e-6 < BACKEND.verify_export(weights, tmp_path / "hf").max_difference < 0.5


def test_the_tokenizer_may_come_from_the_configuration(trained, tmp_path) -> None:
    step, _ = trained
    bare = tmp_path / "step_3"
    shutil.copytree(step, bare)
    for file in (bare / "policy/weights/model").glob("*token*"):
        file.unlink()
    converter = _converter()
    arguments = ["--dcp-ckpt-path", str(bare), "--hf-ckpt-path", str(tmp_path / "hf")]
    assert converter.main(arguments) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("37+85=")["input_ids"]
    (bare / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        BACKEND.export(BACKEND.find_weights(bare), tmp_path / "other")


def test_mistakes_are_refused_with_advice(trained, tmp_path, capsys) -> None:
    step, _ = trained
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").touch()
    with pytest.raises(CheckpointError, match="is not empty"):
        BACKEND.export(BACKEND.find_weights(step), tmp_path / "full")
    with pytest.raises(CheckpointError, match="is no policy checkpoint"):
        BACKEND.find_weights(tmp_path)
    assert _converter().main(["--dcp-ckpt-path", str(tmp_path), "--hf-ckpt-path", str(tmp_path / "hf")]) == 1
    assert "CheckpointError" in capsys.readouterr().err


def test_an_export_of_several_files_has_an_index(trained, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint_io, "MAX_FILE_BYTES", 1_000_000)
    with process_group():
        backend = DTensorBackend(
            policy_config(str(TINY_CHAT)), torch.device("cpu"), init_optimizer=False, init_reference_model=False
        )
        backend.save(CheckpointPaths(tmp_path / "weights", None))
    BACKEND.export(tmp_path / "weights", tmp_path / "hf", str(TINY_CHAT), "bfloat16")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in (tmp_path / "hf").glob("*.safetensors")}
    assert BACKEND.verify_export(tmp_path / "weights", tmp_path / "hf").max_difference < 0.5


def test_a_reward_model_is_compared_by_its_scores(tmp_path) -> None:
    config = policy_config(str(TINY_CHAT), reward_model_cfg={"enabled": True})
    with process_group():
        backend = DTensorBackend(config, torch.device("cpu"), init_optimizer=False, init_reference_model=False)
        backend.save(CheckpointPaths(tmp_path / "weights", None))
    BACKEND.export(tmp_path / "weights", tmp_path / "hf", str(TINY_CHAT))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    assert model.num_labels == 1
    check = BACKEND.verify_export(tmp_path / "weights", tmp_path / "hf")
    assert (check.num_values, check.max_difference <= 1e-6) == (3, True)
    file = next((tmp_path / "hf").glob("*.safetensors"))
    tensors = load_file(file)
    tensors["score.weight"] = tensors["score.weight"] * 2 + 0.1
    save_file(tensors, file, metadata={"format": "pt"})
    assert BACKEND.verify_export(tmp_path / "weights", tmp_path / "hf").max_difference > 1e-4
