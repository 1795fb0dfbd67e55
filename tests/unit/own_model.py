"""Write a folder of a tiny model whose configuration, layers and tokenizer are code in the folder."""

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

TOKENIZER = Path(__file__).parents[1] / "assets/tokenizers/qwen3"
_CONFIGURATION = """
from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "own_of_tests"
    factor = 1.0
"""
_LAYERS = """
import torch
from torch import nn


class SquaredMlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.enter = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.leave = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden):
        return self.leave(torch.relu(self.enter(hidden)) ** 2)
"""
_MODELING = """
from pathlib import Path

from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig
from .layers_own import SquaredMlp

Path(MARK).touch()


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = SquaredMlp(config)
        self.post_init()
"""
_TOKENIZER = """
from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    marks_own_code = True
"""
MAP = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "initializer_range": 0.2,
}


def write_own_model(folder: Path, mark: Path, *, own_tokenizer: bool = False, seed: int = 0) -> Any:
    """Write the folder, and return the model, made from the same files by Python's own import.

    Args:
        mark: a file that the code makes when transformers runs it.
        own_tokenizer: whether the class of the tokenizer is in the folder too.
    """
    parts = {"configuration_own": _CONFIGURATION, "layers_own": _LAYERS, "modeling_own": _MODELING}
    package = folder.parent / f"{folder.name}_package"
    for place, made in ((folder, mark), (package, package / "mark")):
        place.mkdir(parents=True)
        for name, text in parts.items():
            (place / f"{name}.py").write_text(text.replace("MARK", repr(str(made))))
    (package / "__init__.py").touch()
    sys.path.insert(0, str(package.parent))
    try:
        code = importlib.import_module(f"{package.name}.modeling_own")
    finally:
        sys.path.pop(0)
        for name in [name for name in sys.modules if name.partition(".")[0] == package.name]:
            sys.modules.pop(name)
    torch.manual_seed(seed)
    model = code.OwnForCausalLM(code.OwnConfig(**SIZES)).eval()
    model.save_pretrained(folder)
    describe(folder / "config.json", auto_map=MAP)
    if own_tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(TOKENIZER / name, folder / name)
        (folder / "tokenization_own.py").write_text(_TOKENIZER)
        classes = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
        describe(folder / "tokenizer_config.json", auto_map=classes, tokenizer_class="OwnTokenizer")
    return model


def describe(file: Path, **values: Any) -> None:
    """Change values of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
