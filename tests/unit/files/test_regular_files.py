"""No reader of a folder that others may write to waits for a named pipe, or reads a device."""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nemo_rl.commands.regrade.stored_samples import read_samples
from nemo_rl.config.loading.inheritance import read_layers
from nemo_rl.data.datasets.rows.readers import read_file
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.evals.records import _whole_prompts
from nemo_rl.files.regular_file import open_regular, read_bytes, read_text, require_regular_files
from nemo_rl.files.safe_checkpoint import read_metadata
from nemo_rl.files.safe_load import load_plain
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.utils.errors import CheckpointError

TOKENIZER = Path(__file__).parents[2] / "assets/tokenizers/qwen3"


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


KINDS: dict[str, Callable[[Path], None]] = {
    "a named pipe": pipe,
    "a character device": device,
    "a socket": unix_socket,
}


@pytest.mark.parametrize("kind", ["a named pipe", "a character device"])
@pytest.mark.parametrize("read", [open_regular, read_bytes, read_text])
def test_the_message_names_path_and_kind(tmp_path, kind, read):
    path = tmp_path / "file"
    KINDS[kind](path)
    with pytest.raises(OSError, match=f"It is {kind}, and only regular files are read") as refused:
        read(path)
    assert refused.value.filename == str(path)


def test_files_and_links_to_them_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"one\r\ntwo\rthr\xc3\xa9e\n")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link") == b"one\r\ntwo\rthr\xc3\xa9e\n"
    assert read_text(tmp_path / "link") == (tmp_path / "file").read_text(encoding="utf-8") == "one\ntwo\nthrée\n"
    with pytest.raises(IsADirectoryError):
        read_text(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "nothing")


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_with_something_else_is_refused(tmp_path, kind):
    (tmp_path / "inner").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to("nowhere")
    require_regular_files(tmp_path)
    KINDS[kind](tmp_path / "inner" / "x.json")
    with pytest.raises(OSError, match=kind):
        require_regular_files(tmp_path)
    require_regular_files(tmp_path, [".safetensors"])


READERS: dict[str, Callable[[Path], object]] = {
    "config file": read_layers,
    "data rows": lambda path: read_file(str(path)),
    "samples to grade again": lambda path: list(read_samples(path)),
    "answers of an evaluation": lambda path: _whole_prompts(path, 1),
    "plain checkpoint": load_plain,
    "metadata of a checkpoint": read_metadata,
}


@pytest.mark.parametrize("kind", ["a named pipe", "a character device"])
@pytest.mark.parametrize("name", READERS)
def test_no_reader_hangs(tmp_path, name, kind):
    path = tmp_path / "val_data_step98.jsonl"
    KINDS[kind](path)
    with pytest.raises((OSError, ValueError, RuntimeError), match="pipe|device"):
        READERS[name](path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_model_folder_with_a_pipe_is_refused(tmp_path, name):
    folder = tmp_path / "model"
    shutil.copytree(TOKENIZER, folder)
    (folder / name).unlink(missing_ok=True)
    pipe(folder / name)
    with pytest.raises(ValueError, match="named pipe"):
        get_tokenizer({"name": str(folder)})
    with pytest.raises(ValueError, match="named pipe"):
        load_model_config(str(folder))


def test_report_and_watch_read_past_a_pipe(tmp_path):
    """`val_data_step98.jsonl` as a pipe: `report` ends, and names the file."""
    run = tmp_path / "exp_001"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "metrics": {"train/loss": 1.0}}) + "\n")
    for name in ("val_data_step98.jsonl", "run.json", "config.yaml"):
        pipe(run / name)
    command = [sys.executable, "-m", "nemo_rl", "report", str(run), "--output", str(tmp_path / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "val_data_step98.jsonl" in done.stdout + done.stderr and "named pipe" in done.stdout + done.stderr


def test_a_file_of_torch_with_changed_bytes_loads_or_is_refused_by_name(tmp_path):
    path, rng = tmp_path / "train_dataloader.pt", random.Random(1)
    torch.save({"epoch": 0, "loader": {"num_rows": 5, "order": [1, 2.5, "text"]}, "rows": torch.arange(10)}, path)
    content = path.read_bytes()
    refused = 0
    for _ in range(500):
        changed = bytearray(content)
        for _ in range(rng.choice([1, 2, 8, 64])):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        path.write_bytes(changed[: rng.choice([len(changed), rng.randrange(len(changed))])])
        try:
            load_plain(path)
        except CheckpointError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 250
