"""Code of a model's folder runs if `trust_remote_code` says so, in all processes, and only what was trusted."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import COMMIT, Hub, use_hub
from own_model import describe, write_own_model
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.runtime.resume_check import _check_code
from nemo_rl.config import CheckpointingConfig, PolicyConfig, TokenizerConfig
from nemo_rl.config.rules.models import check_own_code, trust_models
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.files import trusted_code
from nemo_rl.files.trusted_code import accept_code, code_files, code_of, copy_code, may_run, trust_code
from nemo_rl.models.generation.vllm.check import check_model
from nemo_rl.models.huggingface.load import load_causal_lm, load_model_config
from nemo_rl.models.huggingface.sizes import count_parameters, parameters_of
from nemo_rl.utils.errors import ConfigError

TOKENS = torch.tensor([[5, 17, 3, 250, 9, 9, 44]])


@pytest.fixture(autouse=True)
def nothing_trusted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trusted_code, "_TRUSTED", set())
    monkeypatch.setattr(trusted_code, "_WARNED", set())
    yield


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "RAN"


@pytest.fixture
def folder(tmp_path: Path, mark: Path) -> Path:
    """A model and a tokenizer with code."""
    write_own_model(tmp_path / "own", mark, own_tokenizer=True)
    return tmp_path / "own"


def policy(name: str | Path, **values: Any) -> PolicyConfig:
    return PolicyConfig.build(**{"model_name": str(name), "trust_remote_code": True, "generation": None, **values})


def trust(*policies: PolicyConfig) -> None:
    trust_models(("policy.model_name", "policy.tokenizer.name", each) for each in policies)


def test_nothing_runs_by_default(folder, mark):
    trust(policy(folder, trust_remote_code=False))
    for load in (load_model_config, load_causal_lm, lambda name: get_tokenizer(TokenizerConfig(name=name))):
        with pytest.raises(ConfigError, match="trust_remote_code=true in a model's section runs this code"):
            load(str(folder))
    assert not mark.exists()


def test_trusted_code_makes_model_and_tokenizer(tmp_path, mark, caplog):
    expected = write_own_model(tmp_path / "own", mark, own_tokenizer=True)
    name = str(tmp_path / "own")
    with caplog.at_level(logging.WARNING, "nemo_rl"):
        trust(policy(name))
    files = code_files(Path(name))
    assert list(files) == ["configuration_own.py", "layers_own.py", "modeling_own.py", "tokenization_own.py"]
    (line,) = caplog.messages
    assert trusted_code.digest_of(files) in line and "policy.model_name" in line and "layers_own.py" in line
    model = load_causal_lm(name)
    assert mark.exists()
    torch.testing.assert_close(model(TOKENS).logits, expected(TOKENS).logits, rtol=0, atol=0)
    assert get_tokenizer(TokenizerConfig(name=name)).marks_own_code
    config = load_model_config(name)
    assert type(AutoModelForCausalLM.from_config(config)).__name__ == "OwnForCausalLM"
    assert parameters_of(config) == count_parameters(name) == sum(each.numel() for each in expected.parameters())


@pytest.mark.parametrize(
    "name", ["owner/name", "owner/name@main", "owner/name@0123456", "owner/name@" + "0" * 39, "/no/such/folder"]
)
def test_a_name_without_folder_or_commit_is_refused(name):
    with pytest.raises(ConfigError, match=r"policy\.model_name=.*a commit of 40 digits: owner/name@COMMIT"):
        trust(policy(name))


def test_code_of_another_repository_is_refused(folder, mark):
    describe(folder / "config.json", auto_map={"AutoConfig": "other/repository--configuration_own.OwnConfig"})
    with pytest.raises(ConfigError, match="code of another repository at its newest commit"):
        trust(policy(folder))
    accept_code(code_files(folder).values())
    assert not may_run(folder)
    assert not mark.exists()


def test_code_that_would_replace_a_class_of_transformers_is_refused(folder):
    own = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    describe(folder / "config.json", auto_map=own, model_type="llama")
    trust(policy(folder))
    with pytest.raises(ConfigError, match="configuration class with a model_type of its own"):
        load_model_config(str(folder))


def test_changed_code_does_not_run(folder, mark, caplog):
    trust(policy(folder))
    (folder / "layers_own.py").write_text((folder / "layers_own.py").read_text() + "\n# changed\n")
    assert not may_run(folder)
    assert "layers_own.py differs from the code that this run trusts" in caplog.text
    with pytest.raises(ConfigError):
        load_causal_lm(str(folder))
    assert not mark.exists()


def test_layers_that_vllm_lacks_are_refused_there(folder):
    trust(policy(folder))
    asked = policy(folder, generation={"backend": "vllm"}, max_total_sequence_length=64)
    with pytest.raises(ConfigError, match="vLLM has no class OwnForCausalLM.*backend=hf"):
        check_model(asked, ClusterConfig.build(device="cpu"))


def test_a_worker_runs_what_the_driver_trusts(folder, mark, monkeypatch):
    trust_code("policy.model_name", str(folder))
    sent = trusted_code.trusted_code()
    monkeypatch.setattr(trusted_code, "_TRUSTED", set())
    assert not may_run(folder)
    accept_code(sent)
    load_model_config(str(folder))
    load_causal_lm(str(folder))
    assert mark.exists()


def test_a_copy_runs_the_same_code(folder, tmp_path):
    trust(policy(folder))
    copy = tmp_path / "copy"
    copy.mkdir()
    model = load_causal_lm(str(folder))
    model.save_pretrained(copy)
    copy_code(folder, copy)
    assert may_run(copy)
    torch.testing.assert_close(load_causal_lm(str(copy))(TOKENS).logits, model(TOKENS).logits, rtol=0, atol=0)
    assert code_of(str(folder)) == code_files(copy)


def test_a_commit_of_the_hub(folder, mark, tmp_path, monkeypatch):
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    hub = Hub(models={"owner/name": files})
    server = hub.start()
    use_hub(monkeypatch, hub.address, tmp_path / "cache")
    try:
        name = f"owner/name@{COMMIT}"
        trust(policy(name))
        assert not any("model.safetensors" in request for request in hub.requests if "GET" in request)
        model = load_causal_lm(name)
        assert get_tokenizer(TokenizerConfig(name=name)).marks_own_code
        hub.requests.clear()
        load_causal_lm(name)
        assert hub.requests == []
    finally:
        server.shutdown()
        server.server_close()
    assert mark.exists()
    assert model.config.name_or_path == str(tmp_path / "cache/models--owner--name/snapshots" / COMMIT)


ALLOWED = {
    "Megatron": ({"megatron_cfg": {"enabled": True}, "dtensor_cfg": {"enabled": False}}, "Megatron Core has layers"),
    "sglang": ({"generation": {"backend": "sglang"}}, "is not proven with sglang engines"),
    "a second model": (
        {"generation": {"vllm_kwargs": {"speculative_config": {"model": "a/b"}}}},
        "would also run code of the draft model",
    ),
    "the engine alone": (
        {"trust_remote_code": False, "generation": {"vllm_kwargs": {"trust_remote_code": True}}},
        "Set policy.trust_remote_code instead",
    ),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_parts_that_run_no_code_are_refused(case):
    values, text = ALLOWED[case]
    found = list(check_own_code([("policy.model_name", "", policy("m", **values))], ClusterConfig.build()))
    assert len(found) == 1 and text in found[0], found


def test_a_resumed_run_refuses_changed_code(folder, tmp_path):
    """Both sides are compared: files of the checkpoint that are gone, and new ones."""
    model, path = policy(folder), tmp_path / "step_1"
    trust(model)
    stored = path / "policy/weights/model"
    stored.mkdir(parents=True)
    copy_code(folder, stored)
    strict, allowing = CheckpointingConfig(), CheckpointingConfig(allow_changed=["policy.trust_remote_code"])
    _check_code("policy", model, strict, path)
    (stored / "layers_own.py").write_text("# another version\n")
    (stored / "older.py").write_text("")
    with pytest.raises(ConfigError, match=r"written: layers_own\.py, older\.py\. Restore it"):
        _check_code("policy", model, strict, path)
    _check_code("policy", model, allowing, path)
    _check_code("policy", policy(folder, trust_remote_code=False), strict, path)
