"""What is decided about checkpoints before Ray starts: where to go on, what may change, whether they fit."""

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl.algorithms.setup import run_folders
from nemo_rl.algorithms.setup.run_folders import RunFolders, open_folders
from nemo_rl.config import SFTMasterConfig, load_config
from nemo_rl.data.datasets import processed_dataset
from nemo_rl.data.datasets.processed_dataset import MixedDataset
from nemo_rl.data.datasets.rows.shapes import ShapesRows
from nemo_rl.models.dtensor.training_backend import DTensorTraining
from nemo_rl.models.huggingface.sizes import count_parameters
from nemo_rl.utils.errors import CheckpointError, ConfigError

ROOT = Path(__file__).resolve().parents[4]
ROWS = 100


def config_of(folder: Path, *overrides: str) -> SFTMasterConfig:
    base = [f"checkpointing.checkpoint_dir={folder}/checkpoints", f"logger.log_dir={folder}/logs"]
    base += ["checkpointing.metric_name=null"]
    return load_config(ROOT / "examples/configs/sft_cpu.yaml", base + list(overrides), schema=SFTMasterConfig)


class Rows:
    """A part of the training data with these raw rows."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def source(self, idx: int) -> Any:
        return self._rows[idx]


def start(folder: Path, *overrides: str, num_rows: int = ROWS, rows: Sequence[Any] | None = None) -> RunFolders:
    config = config_of(folder, *overrides)
    part: Any = Rows([{"text": f"row {number}"} for number in range(num_rows)] if rows is None else rows)
    return open_folders(config, config.models, MixedDataset([part]), ExitStack())


def save(folder: Path, step: int, *overrides: str, rows: Sequence[Any] | None = None) -> Path:
    """Write a checkpoint as a run with these overrides would."""
    config = config_of(folder, *overrides)
    checkpoints = start(folder, *overrides, "checkpointing.allow_changed=[policy,sft,data]", rows=rows).checkpoints
    path = checkpoints.init_tmp_checkpoint(step, {"total_steps": step}, config)
    torch.save({"epoch": 0, "loader": {"num_rows": ROWS}}, path / "train_dataloader.pt")
    for part in ("weights", "optimizer") if config.checkpointing.save_optimizer else ("weights",):
        (path / "policy" / part).mkdir(parents=True)
        (path / "policy" / part / "part").write_text(part)
    checkpoints.finalize_checkpoint(path)
    return folder / "checkpoints" / f"step_{step}"


def test_a_fresh_run_and_one_that_goes_on(tmp_path):
    assert start(tmp_path).resume_path is None
    assert (tmp_path / "logs/exp_001/config.yaml").exists()
    path = save(tmp_path, 2)
    assert start(tmp_path).resume_path == path


def test_other_rows_of_the_same_number_are_refused(tmp_path):
    save(tmp_path, 2)
    rows = [{"text": f"row {number}"} for number in range(ROWS)]
    start(tmp_path, rows=rows)
    for others in (rows[::-1], [*rows[:-1], {"text": "row 99 changed"}], [{"text": "row 0", "more": 1}, *rows[1:]]):
        with pytest.raises(ConfigError, match=r"(?s)as many rows as when .*step_2 was written.*allow_changed=\[data"):
            start(tmp_path, rows=others)
        start(tmp_path, "checkpointing.allow_changed=[data.train]", rows=others)


def test_rows_that_differ_only_in_the_bytes_of_an_image_are_refused(tmp_path):
    rows, others = [*ShapesRows("train", ROWS, 1, None)], [*ShapesRows("train", ROWS, 1, None)]
    image = others[50]["messages"][0]["content"][0]["image"]
    image["bytes"] = image["bytes"][:-1] + bytes([image["bytes"][-1] ^ 1])
    save(tmp_path, 2, rows=rows)
    start(tmp_path, rows=[*ShapesRows("train", ROWS, 1, None)])
    with pytest.raises(ConfigError, match="their content or order differs"):
        start(tmp_path, rows=others)


def test_of_many_rows_some_at_equal_distances_count(monkeypatch):
    monkeypatch.setattr(processed_dataset, "CHECKED_ROWS", 5)
    rows = [{"text": str(number)} for number in range(9)]

    def checksum(rows: Sequence[Any]) -> str:
        parts: Any = [Rows(rows[:4]), Rows(rows[4:])]
        return MixedDataset(parts).checksum()

    changed = [
        number
        for number in range(9)
        if checksum([*rows[:number], {"text": "x"}, *rows[number + 1 :]]) != checksum(rows)
    ]
    assert changed == [0, 2, 4, 6, 8] and checksum(rows[:8]) != checksum(rows)


def test_what_changed_is_said_in_one_record(tmp_path, caplog):
    caplog.set_level("INFO", logger="nemo_rl")
    path = save(tmp_path, 2)
    start(tmp_path)
    assert "Changed since" not in caplog.text
    start(tmp_path, "policy.optimizer.kwargs.lr=1e-5", "sft.max_num_steps=7")
    (said,) = [record.message for record in caplog.records if record.message.startswith("Changed")]
    assert said.splitlines() == [
        f"Changed since {path}, and applied from the next step on:",
        "  policy.optimizer.kwargs.lr: 0.0005 -> 1e-05",
        "  sft.max_num_steps: 100 -> 7",
    ]


def test_what_a_run_cannot_take_over_is_refused_until_it_is_allowed(tmp_path, caplog):
    caplog.set_level("INFO", logger="nemo_rl")
    path = save(tmp_path, 2)
    changes = ("sft.seed=7", f"policy.model_name={ROOT}/examples/assets", "policy.optimizer.kwargs.lr=1")
    with pytest.raises(ConfigError) as refusal:
        start(tmp_path, *changes)
    said = str(refusal.value)
    assert "  sft.seed: 42 -> 7\n" in said and "policy.optimizer.kwargs.lr" not in said
    allowed = said.splitlines()[-1].strip()
    assert allowed == "checkpointing.allow_changed=[policy.model_name,policy.tokenizer.name,sft.seed]"
    assert start(tmp_path, *changes, allowed).resume_path == path
    assert "  sft.seed: 42 -> 7" in caplog.text


MEGATRON = ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true")


@pytest.mark.parametrize("first_is_megatron", [False, True])
@pytest.mark.parametrize("has_model", [False, True])
def test_training_state_of_another_backend_is_refused_with_the_way_to_its_weights(
    tmp_path, first_is_megatron, has_model
):
    path = save(tmp_path, 2, *(MEGATRON if first_is_megatron else ()))
    weights = path / "policy/weights/model"
    model = weights / "consolidated" if first_is_megatron else weights
    if has_model:
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
    allowed = "checkpointing.allow_changed=[policy.dtensor_cfg.enabled,policy.megatron_cfg.enabled]"
    for overrides in ((), (allowed,)):
        with pytest.raises(ConfigError) as refusal:
            start(tmp_path, *(() if first_is_megatron else MEGATRON), *overrides)
        said = str(refusal.value)
        before, now = ("megatron_cfg", "dtensor_cfg") if first_is_megatron else ("dtensor_cfg", "megatron_cfg")
        assert f"was written by policy.{before}, and this run trains by policy.{now}" in said
        wanted = model if has_model else tmp_path / "checkpoints" / "step_2_hf"
        assert f"policy.model_name={wanted} checkpointing.checkpoint_dir=" in said
        converter = f"convert_{'megatron' if first_is_megatron else 'dcp'}_to_hf.py --config {path}/config.yaml"
        assert (converter in said) is not has_model


def test_another_number_of_rows_is_refused_until_it_is_allowed(tmp_path):
    path = save(tmp_path, 2)
    with pytest.raises(ConfigError, match=r"(?s)has 99 rows now; it had 100 .*allow_changed=\[data.train\]"):
        start(tmp_path, num_rows=99)
    assert start(tmp_path, "checkpointing.allow_changed=[data.train]", num_rows=99).resume_path == path


def test_a_lost_optimizer_is_refused_until_it_is_allowed(tmp_path, caplog):
    path = save(tmp_path, 2)
    shutil.rmtree(path / "policy/optimizer")
    with pytest.raises(ConfigError, match=r"(?s)no folder policy/optimizer: .*allow_changed=\[policy.optimizer\]"):
        start(tmp_path)
    assert start(tmp_path, "checkpointing.allow_changed=[policy.optimizer]").resume_path == path
    assert (
        "has no optimizer state of policy: its optimizer, learning-rate schedule and random numbers start again"
        in caplog.text
    )


def test_an_optimizer_that_was_not_saved_is_said_to_start_anew(tmp_path, caplog):
    path = save(tmp_path, 2, "checkpointing.save_optimizer=false")
    assert start(tmp_path, "checkpointing.save_optimizer=false").resume_path == path
    assert "(it was written with checkpointing.save_optimizer=false): its optimizer, learning-rate" in caplog.text


@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_a_damaged_data_position_is_named_even_without_checksums(tmp_path, content):
    path = save(tmp_path, 2)
    (path / "manifest.json").unlink()
    (path / "train_dataloader.pt").unlink()
    if content is not None:
        (path / "train_dataloader.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"train_dataloader\.pt (cannot be read|is refused: it is damaged)"):
        start(tmp_path)


def test_a_damaged_configuration_is_named(tmp_path):
    path = save(tmp_path, 2)
    (path / "manifest.json").unlink()
    for content in (b"a: [", b"\xff\xfe", b"text"):
        (path / "config.yaml").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"config\.yaml.* (cannot be read|is not a configuration)"):
            start(tmp_path)


def test_parameters_are_counted_from_headers(tmp_path):
    model = ROOT / "examples/assets/tiny-chat"
    want = sum(tensor.numel() for file in model.glob("*.safetensors") for tensor in load_file(file).values())
    assert count_parameters(str(model)) == want
    assert count_parameters("no-such-user/has-this-model") is None
    (tmp_path / "model.safetensors").write_bytes(b"short")
    assert count_parameters(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("overrides", "bytes_per_parameter"),
    [
        ([], 12),
        (["checkpointing.save_consolidated=true"], 16),
        (["checkpointing.save_consolidated=true", "policy.precision=bfloat16"], 14),
        (["checkpointing.save_optimizer=false"], 8),
        (["checkpointing.save_optimizer=false", "checkpointing.save_consolidated=true"], 8),
        (["policy.dtensor_cfg.lora_cfg.enabled=true"], 8),
        (["policy.optimizer.name=torch.optim.SGD"], 8),
    ],
)
def test_the_first_checkpoint_is_estimated_from_the_model(tmp_path, overrides, bytes_per_parameter):
    config = config_of(tmp_path, *overrides)
    parameters = count_parameters(config.policy.model_name)
    assert DTensorTraining().checkpoint_bytes(config.policy, config.checkpointing) == bytes_per_parameter * parameters


def test_a_disk_without_room_is_refused_and_a_scarce_one_warned_of(tmp_path, monkeypatch, caplog):
    config = config_of(tmp_path)
    one = DTensorTraining().checkpoint_bytes(config.policy, config.checkpointing)
    for free, said in ((one * 5, False), (one * 5 - 1, True)):
        monkeypatch.setattr(run_folders, "free_bytes", lambda folder, free=free: free)
        start(tmp_path)
        assert ("may run out" in caplog.text) is said
    monkeypatch.setattr(run_folders, "free_bytes", lambda folder: one - 1)
    with pytest.raises(CheckpointError, match=r"no space for a checkpoint in .*/checkpoints: .* 12\.\d MB are free"):
        start(tmp_path)


def test_the_size_of_a_written_checkpoint_counts_more_than_the_estimate(tmp_path, monkeypatch):
    path = save(tmp_path, 2)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.name != "manifest.json" and file.is_file())
    assert start(tmp_path).checkpoints.expected_bytes == size
    monkeypatch.setattr(run_folders, "free_bytes", lambda folder: size - 1)
    with pytest.raises(CheckpointError, match="no space for a checkpoint"):
        start(tmp_path)


def test_without_checkpoints_no_folder_is_made(tmp_path):
    folders = start(tmp_path, "checkpointing.enabled=false")
    assert (folders.checkpoints, folders.resume_path) == (None, None)
    assert os.listdir(tmp_path) == ["logs"]
