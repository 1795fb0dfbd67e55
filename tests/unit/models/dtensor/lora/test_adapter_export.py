"""Adapters merged into their base give the trained policy; adapters that cannot be merged are refused."""

import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from policy_helpers import (
    WeightedNLL,
    hf_logprobs,
    policy_config,
    process_group,
    random_batch,
    save_tiny_model,
    tiny_model,
)
from safetensors.torch import load_file, save_file
from tiny_models import make_char_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.checkpoints.lora_export import adapter_source, export_merged, find_adapter, verify_merged
from nemo_rl.models.dtensor.lora import read_adapter_config
from nemo_rl.models.policy.batching import count_valid, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.utils.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[5]
LORA = {"enabled": True, "dim": 4, "alpha": 8}
VOCAB = len(make_char_tokenizer())


def converter():
    spec = importlib.util.spec_from_file_location("lora_converter", ROOT / "examples/converters/convert_lora_to_hf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained_step(folder: Path, arch: str, tie: bool) -> SimpleNamespace:
    """Make a base model, and a step folder of LoRA training on it."""
    base = save_tiny_model(folder / "base", arch, tie=tie, vocab_size=VOCAB)
    make_char_tokenizer().save_pretrained(base)
    config = policy_config(base, dtensor_cfg={"lora_cfg": LORA})
    weights = folder / "step_2/policy/weights"
    with process_group():
        worker = PolicyWorker(DTensorBackend(config, torch.device("cpu")), config)
        for seed in (1, 2):
            data = random_batch(rows=6, seed=seed)
            batch = shard_batch(data, 1, training_strategy(config))
            worker.train(batch.data[0], batch.sizes[0], WeightedNLL(), count_valid(data))
        worker.save_checkpoint(str(weights))
    return SimpleNamespace(base=base, step=folder / "step_2", merged=weights / "model", adapter=weights / "adapter")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> SimpleNamespace:
    return trained_step(tmp_path_factory.mktemp("lora"), "qwen2", tie=True)


def run(trained: SimpleNamespace, target: Path, *flags: str) -> int:
    return converter().main(["--adapter-ckpt", str(trained.step), "--hf-ckpt-path", str(target), *flags])


def assert_same_weights(ours: Path, theirs: Path, tolerance: float = 0.0) -> None:
    one, other = (AutoModelForCausalLM.from_pretrained(folder) for folder in (ours, theirs))
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(one.get_parameter(name), parameter, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("arch", "tie"), [("qwen2", True), ("llama", False)])
def test_the_command_writes_the_trained_policy(arch, tie, tmp_path, capsys) -> None:
    trained = trained_step(tmp_path, arch, tie)
    assert run(trained, tmp_path / "hf", "--verify") == 0
    printed = capsys.readouterr().out
    assert float(printed.split("log-probabilities: ")[1]) <= 1e-4
    assert_same_weights(tmp_path / "hf", trained.merged)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("37+85=")["input_ids"]
    data = random_batch(rows=3)
    before = hf_logprobs(AutoModelForCausalLM.from_pretrained(trained.base).eval(), data)
    after = hf_logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval(), data)
    assert (after - before).abs().max() > 1e-2, "the adapter changes the model"


def test_a_damaged_export_is_noticed(trained, tmp_path) -> None:
    source = adapter_source(trained.step)
    export_merged(source, tmp_path / "hf")
    assert verify_merged(source, tmp_path / "hf").holds_for(None)
    file = next((tmp_path / "hf").glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if "down_proj" in name)
    save_file(tensors | {name: tensors[name] * 1.1}, file, metadata={"format": "pt"})
    assert not verify_merged(source, tmp_path / "hf").holds_for(None)
    shutil.copytree(trained.base, tmp_path / "unmerged")
    assert not verify_merged(source, tmp_path / "unmerged").holds_for(None)


def test_an_export_in_bfloat16_takes_half_the_bytes(trained, tmp_path) -> None:
    assert run(trained, tmp_path / "hf", "--dtype", "bfloat16", "--verify") == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert exported.dtype == torch.bfloat16
    merged = AutoModelForCausalLM.from_pretrained(trained.merged)
    for name, parameter in merged.named_parameters():
        assert torch.equal(exported.get_parameter(name), parameter.to(torch.bfloat16)), name


def test_the_base_model_may_have_moved_or_be_a_full_checkpoint(trained, tmp_path) -> None:
    config = policy_config(trained.base)
    step = tmp_path / "step_7"
    with process_group():
        backend = DTensorBackend(config, torch.device("cpu"))
        PolicyWorker(backend, config).save_checkpoint(str(step / "policy/weights"))
    make_char_tokenizer().save_pretrained(step / "policy/weights/model")
    moved = shutil.copytree(trained.base, tmp_path / "moved")
    for number, base in enumerate((step, moved)):
        assert run(trained, tmp_path / f"hf{number}", "--base-ckpt", str(base), "--verify") == 0
        assert_same_weights(tmp_path / f"hf{number}", trained.merged)
    assert run(trained, tmp_path / "hf2", "--hf-model-name", str(moved)) == 0
    assert_same_weights(tmp_path / "hf2", trained.merged)


def test_the_adapter_can_be_exported_alone(trained, tmp_path) -> None:
    moved = shutil.copytree(trained.base, tmp_path / "moved")
    assert run(trained, tmp_path / "adapter", "--adapter-only", "--base-ckpt", str(moved)) == 0
    assert read_adapter_config(tmp_path / "adapter")["base_model_name_or_path"] == str(moved)
    source = adapter_source(tmp_path / "adapter")
    export_merged(source, tmp_path / "hf")
    assert_same_weights(tmp_path / "hf", trained.merged)


def test_peft_merges_to_the_same_weights(trained, tmp_path) -> None:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(trained.base)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(tmp_path / "adapter")
    export_merged(adapter_source(tmp_path / "adapter", trained.base), tmp_path / "hf")
    adapted.merge_and_unload().save_pretrained(tmp_path / "theirs")
    assert_same_weights(tmp_path / "hf", tmp_path / "theirs", tolerance=1e-6)


@pytest.mark.parametrize("given", ["", "policy", "policy/weights", "policy/weights/adapter"])
def test_adapters_are_found_from_any_folder_of_a_step(trained, given) -> None:
    assert find_adapter(trained.step / given) == trained.adapter


def changed_adapter(trained: SimpleNamespace, folder: Path, **values: object) -> Path:
    shutil.copytree(trained.adapter, folder)
    described = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(described | values))
    return folder


@pytest.mark.parametrize(
    "values", [{"use_dora": True}, {"use_rslora": True}, {"bias": "all"}, {"modules_to_save": ["x"]}]
)
def test_adapters_with_more_than_two_matrices_are_refused(values, trained, tmp_path) -> None:
    folder = changed_adapter(trained, tmp_path / "adapter", **values)
    with pytest.raises(CheckpointError, match=f"more than a plain LoRA adapter .*: {next(iter(values))}"):
        export_merged(adapter_source(folder), tmp_path / "hf")


def test_mistakes_are_refused_with_advice(trained, tmp_path, capsys) -> None:
    with pytest.raises(CheckpointError, match="holds no LoRA adapter"):
        find_adapter(tmp_path)
    with pytest.raises(CheckpointError, match="names no base model"):
        adapter_source(changed_adapter(trained, tmp_path / "nameless", base_model_name_or_path=None))
    with pytest.raises(CheckpointError, match="is no policy checkpoint"):
        adapter_source(trained.step, str(tmp_path / "nameless"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").touch()
    with pytest.raises(CheckpointError, match="is not empty"):
        export_merged(adapter_source(trained.step), tmp_path / "full")
    tiny_model("llama", num_hidden_layers=1, vocab_size=VOCAB).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"7 of 14 adapted layers are no linear layers of it, for example 'model"):
        export_merged(adapter_source(trained.step, str(tmp_path / "other")), tmp_path / "hf")
    assert run(trained, tmp_path / "full") == 1
    assert "is not empty" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(trained, tmp_path / "hf", "--adapter-only", "--verify")
