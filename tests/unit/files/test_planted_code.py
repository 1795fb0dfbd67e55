"""No code of a folder runs unless the user asked for it: models, tokenizers, checkpoints, data, the current folder."""

import ast
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from package_source import ROOT, files, tree_of
from transformers import Qwen2Config, Qwen2ForCausalLM

from nemo_rl.config import TokenizerConfig
from nemo_rl.data.datasets.hub import _load_hub
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.environments.grading.pool import GradingProcess
from nemo_rl.evals.records import _whole_prompts
from nemo_rl.files import trusted_code
from nemo_rl.files.safe_checkpoint import read_metadata
from nemo_rl.files.safe_load import load_plain
from nemo_rl.kits.judges.reward_model import _require_classifier
from nemo_rl.models.generation.responses import stop_token_ids
from nemo_rl.models.huggingface.load import load_causal_lm, load_model_config, load_scoring_model
from nemo_rl.models.huggingface.sizes import count_parameters
from nemo_rl.utils.errors import ConfigError, DataError

TOKENIZER = Path(__file__).parents[2] / "assets/tokenizers/qwen3"
MODULES = ("configuration_planted", "modeling_planted", "tokenization_planted")
CLASSES = {
    "AutoConfig": "configuration_planted.PlantedConfig",
    "AutoModel": "modeling_planted.PlantedModel",
    "AutoModelForCausalLM": "modeling_planted.PlantedModel",
    "AutoModelForSequenceClassification": "modeling_planted.PlantedModel",
    "AutoTokenizer": ["tokenization_planted.PlantedTokenizer", "tokenization_planted.PlantedTokenizer"],
}


class Bomb:
    """A value whose pickle runs code when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that planted code makes."""
    return tmp_path / "RAN"


def model_folder(folder: Path, mark: Path, *, known_type: bool, weights: str = "safetensors") -> Path:
    """Make a model whose folder brings code for each of its parts."""
    shutil.copytree(TOKENIZER, folder)
    config = Qwen2Config(
        vocab_size=8000,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    if weights == "pickle":
        (folder / "model.safetensors").unlink()
        torch.save({**model.state_dict(), "bomb": Bomb(mark)}, folder / "pytorch_model.bin")
    described = json.loads((folder / "config.json").read_text())
    described["auto_map"] = CLASSES
    if not known_type:
        described["model_type"] = "planted"
    (folder / "config.json").write_text(json.dumps(described))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"auto_map": CLASSES} | ({} if known_type else {"tokenizer_class": "PlantedTokenizer"})
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    for module in (*MODULES, "__init__", "setup", "sitecustomize", "conftest", "custom_generate/generate"):
        (folder / module).parent.mkdir(exist_ok=True)
        (folder / f"{module}.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n")
    return folder


def tokenizer_of(folder: Path) -> Any:
    return get_tokenizer(TokenizerConfig(name=str(folder)))


LOADERS: dict[str, Callable[[Path], Any]] = {
    "configuration": lambda folder: load_model_config(str(folder)),
    "policy": lambda folder: load_causal_lm(str(folder)),
    "critic or reward model": lambda folder: load_scoring_model(str(folder)),
    "tokenizer": tokenizer_of,
    "sizes": lambda folder: count_parameters(str(folder)),
    "stop tokens": lambda folder: stop_token_ids(str(folder), 1, None),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("known_type", [True, False], ids=["known type", "type of its own"])
def test_the_code_of_a_model_does_not_run(tmp_path, mark, name, known_type, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # no caller is asked whether code may run
    folder = model_folder(tmp_path / "model", mark, known_type=known_type)
    try:
        LOADERS[name](folder)
    except (ValueError, OSError, RuntimeError, KeyError, TypeError):
        assert not known_type or name == "sizes"
    assert not mark.exists()


@pytest.mark.parametrize("load", [load_causal_lm, load_scoring_model])
def test_the_pickle_of_a_model_does_not_run(tmp_path, mark, load):
    folder = model_folder(tmp_path / "model", mark, known_type=True, weights="pickle")
    with pytest.raises(Exception, match=r".*"):
        load(str(folder))
    assert not mark.exists()


def test_the_planted_code_would_run(tmp_path, mark, monkeypatch):
    """With the permission of the user: otherwise the tests above prove nothing."""
    folder = model_folder(tmp_path / "model", mark, known_type=False)
    monkeypatch.setattr(trusted_code, "_TRUSTED", set())
    trusted_code.trust_code("policy.tokenizer.name", str(folder))
    with pytest.raises((AttributeError, ValueError, ConfigError)):
        tokenizer_of(folder)
    assert mark.exists()
    mark.unlink()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists()


@pytest.mark.parametrize("read", [load_plain, read_metadata, lambda path: _whole_prompts(path, 1)])
def test_pickles_of_checkpoints_do_not_run(tmp_path, mark, read):
    path = tmp_path / "state"
    torch.save({"value": Bomb(mark)}, path)
    with pytest.raises((ValueError, RuntimeError)):
        read(path)
    path.write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises((ValueError, RuntimeError)):
        read(path)
    assert not mark.exists()


def test_the_script_of_a_data_set_does_not_run(tmp_path, mark):
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "data.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    for name in ("rows", "__init__", "dataset", "sitecustomize"):
        (folder / f"{name}.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n")
    with pytest.raises(DataError, match="scripts are no longer supported"):
        _load_hub(str(folder), None, "train", "data.train")
    (folder / "rows.py").unlink()
    assert list(_load_hub(str(folder), None, "train", "data.train"))[0]["question"] == "1+1"
    assert not mark.exists()


ASKED = re.compile(r"False|may_run\(.*\)|trusted")
BELOW_A_QUESTION = {"nemo_rl/data/tokenizer.py", "nemo_rl/models/huggingface/load.py"}
"""Files that write True where `may_run` has just allowed it."""
KEYS = {"nemo_rl/config/runs/eval.py", "nemo_rl/config/schema/judges.py"}
"""Files that pass the key from one section to another."""


def test_each_load_asks_whether_code_may_run() -> None:
    words = [
        (f"{file.relative_to(ROOT)}", ast.unparse(word.value))
        for file in files()
        if "trust_remote_code" in file.read_text(encoding="utf-8")
        for word in ast.walk(tree_of(file))
        if isinstance(word, ast.keyword) and word.arg == "trust_remote_code"
    ]
    others = {name for name, value in words if ASKED.fullmatch(value) is None}
    assert others == BELOW_A_QUESTION | KEYS


PLANTED = ("sitecustomize", "usercustomize", "argparse", "dataclasses", "json", "torch", "numpy", "transformers", "ray")


@pytest.fixture
def hostile_folder(tmp_path: Path) -> Path:
    """A folder with files that are named like modules."""
    folder = tmp_path / "current"
    folder.mkdir()
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path)!r} + '/RAN_{name}', 'w').close()\n")
    return folder


@pytest.mark.parametrize("command", [["doctor", "--help"], ["report", "--help"], ["report", "."]])
def test_modules_of_the_current_folder_replace_none(hostile_folder, command):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    subprocess.run(
        [sys.executable, "-m", "nemo_rl", *command],
        cwd=hostile_folder,
        capture_output=True,
        env=environment,
        timeout=120,
    )
    assert not list(hostile_folder.parent.glob("RAN_*"))


def test_a_grading_process_runs_nothing_of_the_current_folder(hostile_folder, monkeypatch):
    monkeypatch.chdir(hostile_folder)
    monkeypatch.setattr(sys, "path", [*sys.path, str(hostile_folder)])  # as programs of the library do
    process = GradingProcess("nemo_rl.environments.grading.final_answer.grade_plain_number", 4096)
    process.wait_ready(60)
    process.kill()
    assert not list(hostile_folder.parent.glob("RAN_*"))


def test_a_reward_model_brings_no_code(tmp_path, mark):
    folder = model_folder(tmp_path / "model", mark, known_type=False)
    with pytest.raises((ValueError, OSError, RuntimeError, KeyError, TypeError)):
        _require_classifier(str(folder))
    assert not mark.exists()
