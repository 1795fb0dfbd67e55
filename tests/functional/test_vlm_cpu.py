"""Models that read images, trained end to end on the CPU: GRPO, SFT, DPO, and the checkpoint in plain transformers."""

import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from example_runs import (
    REPOSITORY,
    ExampleRun,
    Metrics,
    StartExample,
    of_training,
    read_metrics,
    run_environment,
)
from PIL import Image as Pictures
from small_disk import fill, small_disk
from transformers import AutoModelForImageTextToText, AutoProcessor

from nemo_rl.__main__ import main
from nemo_rl.data.datasets.rows.shapes import QUESTION, ShapesRows

pytest.importorskip("torchvision")
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

CONFIG = "vlm_grpo_cpu.yaml"
FEW = (
    "grpo.num_prompts_per_step=4",
    "policy.train_global_batch_size=32",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
)
NO_CHECKPOINT = "checkpointing.enabled=false"
AHEAD = (
    "grpo.overlap.mode=ahead",
    "grpo.overlap.in_flight_weight_updates=true",
    "loss_fn.use_importance_sampling_correction=true",
)
IN_ORDER = (
    "grpo.overlap.mode=ahead",
    "grpo.overlap.order=in_order",
    "grpo.overlap.in_flight_weight_updates=false",
    "grpo.overlap.max_age_steps=2",
)
"""Sampling ahead in a fixed order, which a killed run repeats."""
LONGEST_WAIT_S = 0.6
"""A run is killed up to so many seconds after a step."""
MODES = {
    "ahead": AHEAD,
    "two ranks": ("cluster.ranks_per_node=2",),
    "runners": ("cluster.rollout_runners=1",),
    "hf engine": ("policy.generation.backend=hf",),
    "padded": ("policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=32"),
    "frozen tower": ("policy.dtensor_cfg.automodel_kwargs.freeze_config.freeze_vision_tower=true",),
    "lora": ("policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=4"),
}


def weights(folder: Path) -> dict[str, str]:
    """Return the checksums of the policy's files in a checkpoint. `.metadata` has the path of the checkpoint."""
    files = json.loads((folder / "manifest.json").read_text())["files"]
    return {name: each for name, each in files.items() if name.startswith("policy/") and ".metadata" not in name}


def test_a_stopped_run_with_images_repeats_the_plain_run_bit_for_bit(
    start_example: StartExample, tmp_path: Path
) -> None:
    """Engine and trainer agree in every step, and the checkpoint loads with its image processor."""
    metrics = []
    for name, stops in (("plain", [4]), ("stopped", [2, 4])):
        overrides = ("checkpointing.save_period=2", f"checkpointing.checkpoint_dir={tmp_path}/{name}")
        for number, steps in enumerate(stops):
            logs = f"{name}_{number}"
            run = start_example("run_vlm_grpo.py", CONFIG, *FEW, *overrides, f"grpo.max_num_steps={steps}", logs=logs)
            assert run.finish() == 0, run.log()[-3000:]
        metrics.append({key: value for key, value in of_training(read_metrics(run.log_dir)).items() if key[1] > 2})
    assert "Resuming from" in run.log()
    assert metrics[0] == metrics[1]
    assert len(metrics[0]) > 20
    assert weights(tmp_path / "plain/step_4") == weights(tmp_path / "stopped/step_4")
    AutoProcessor.from_pretrained(tmp_path / "plain/step_4/policy/weights/model")


@pytest.mark.long
def test_engines_that_differ_are_named_without_a_comparison_of_layers(start_example: StartExample) -> None:
    """Rounding alone is above this limit."""
    limit = "policy.generation.weight_sync.max_mult_prob_error=1.0000000001"
    run = start_example("run_vlm_grpo.py", CONFIG, *FEW, NO_CHECKPOINT, "grpo.max_num_steps=1", limit)
    assert run.finish() != 0
    assert "The engines do not sample from the policy" in run.log()
    assert "Layers are compared for rows without images only." in run.log()


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_with_images_that_is_killed_at_random_moments_repeats_the_plain_run_bit_for_bit(
    start_example: StartExample, tmp_path: Path, seed: int
) -> None:
    """Metrics, samples with their tokens and images, weights and optimizer are equal."""
    draws = random.Random(seed)
    overrides = (*FEW, *(IN_ORDER if seed == 2 else ()), "grpo.max_num_steps=8", "checkpointing.save_period=2")

    def start(name: str, logs: str) -> ExampleRun:
        folder = f"checkpointing.checkpoint_dir={tmp_path}/{name}"
        return start_example("run_vlm_grpo.py", CONFIG, *overrides, folder, logs=logs)

    plain = start("plain", "plain")
    assert plain.finish() == 0, plain.log()[-3000:]
    logs = []
    for kill, step in enumerate((1, 3, 5)):
        run = start("killed", f"killed_{kill}")
        logs.append(run.log_dir)
        run.wait_for(rf"step [{step}-8]/8")  # a run may start after this step
        time.sleep(draws.uniform(0, LONGEST_WAIT_S))
        run.processes()
        run.process.kill()
        assert run.finish() != 0, "the run ended before it was killed: the wait is too long"
        assert run.survivors() == []
    run = start("killed", "resumed")
    assert run.finish() == 0, run.log()[-3000:]
    assert "Resuming from" in run.log()
    found: Metrics = {}
    for folder in (*logs, run.log_dir):
        found |= of_training(read_metrics(folder))
    assert found == of_training(read_metrics(plain.log_dir))
    assert samples_of(*logs, run.log_dir) == (expected := samples_of(plain.log_dir))
    assert len(expected) == 8
    weights_of_both = weights(tmp_path / "plain/step_8"), weights(tmp_path / "killed/step_8")
    assert weights_of_both[0] == weights_of_both[1]
    assert {"weights", "optimizer"} <= {name.split("/")[1] for name in weights_of_both[0]}


@pytest.mark.long
def test_a_full_disk_leaves_no_half_files_and_the_run_resumes(start_example: StartExample, tmp_path: Path) -> None:
    with small_disk(tmp_path, "60m") as disk:
        places = (f"logger.log_dir={disk}/logs", f"checkpointing.checkpoint_dir={disk}/checkpoints")
        overrides = (*FEW, "grpo.max_num_steps=6", "checkpointing.save_period=2", *places)
        run = start_example("run_vlm_grpo.py", CONFIG, *overrides)
        run.wait_for("step 2/6")
        filling = fill(disk, leave_bytes=0)
        assert run.finish() == 1, run.log()[-3000:]
        for name in ("Pictures of images", "Conversations"):
            assert re.search(rf"{name} in \S+ cannot be written: \[Errno 28\]", run.log())
        assert re.search(r"CheckpointError: step_6 could not be written to \S+: no space left", run.log())
        left = [path for path in disk.rglob("*") if path.name.endswith(".partial") or path.name.startswith("tmp_")]
        pictures = [*disk.glob("logs/exp_001/images/*")]
        assert left == []
        assert pictures
        assert {Pictures.open(path).copy().size for path in pictures} == {(28, 28)}
        filling.unlink()
        resumed = start_example("run_vlm_grpo.py", CONFIG, *overrides)
        assert resumed.finish() == 0, resumed.log()[-3000:]
        assert f"Resuming from {disk}/checkpoints/step_2" in resumed.log()


@pytest.mark.long
def test_recorded_steps_with_images_are_repeated_bit_for_bit(start_example: StartExample, tmp_path: Path) -> None:
    recorded = ("logger.record_steps=true", "logger.record_modules=true", "checkpointing.save_period=1")
    places = f"checkpointing.checkpoint_dir={tmp_path}/checkpoints"
    run = start_example("run_vlm_grpo.py", CONFIG, *FEW, *recorded, places, "grpo.max_num_steps=2")
    assert run.finish() == 0, run.log()[-3000:]

    def replay(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "nemo_rl", "replay", str(run.log_dir), *arguments]
        environment = run_environment() | {"PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        return done.returncode, done.stdout + done.stderr

    for step in (1, 2):
        status, output = replay(f"--step={step}")
        assert status == 0, output
        assert f"Step {step} is equal to that of the run, bit for bit." in output
        assert "Not compared" not in output
    status, output = replay("--step=2", "data.train.seed=7")
    assert status == 1, output
    assert "image 1 has another content or size in the data" in output


def samples_of(*log_dirs: Path) -> dict[str, str]:
    """Return the samples of each step, of the last run that trained on it."""
    paths = (path for folder in log_dirs for path in folder.glob("exp_*/train_data_step*.jsonl"))
    return {path.name: path.read_text() for path in paths}


def test_engine_and_trainer_agree_with_shared_prompts(start_example: StartExample) -> None:
    check_agreement(start_example, "policy.sequence_packing.share_prompts=true")


@pytest.mark.parametrize("mode", MODES)
def test_engine_and_trainer_agree_in_every_mode(start_example: StartExample, mode: str) -> None:
    check_agreement(start_example, *MODES[mode], most=1.2 if mode == "ahead" else 1.0001)


def check_agreement(start_example: StartExample, *overrides: str, most: float = 1.0001) -> None:
    run = start_example("run_vlm_grpo.py", CONFIG, *FEW, *overrides, "grpo.max_num_steps=4", NO_CHECKPOINT)
    assert run.finish() == 0, run.log()[-3000:]
    metrics = read_metrics(run.log_dir)
    errors = [value for (_, _, name), value in metrics.items() if name == "token_mult_prob_error"]
    assert len(errors) == 4
    assert max(errors) < most


@pytest.mark.parametrize("runners", [0, 1])
def test_logs_and_report_show_the_images_of_samples(start_example: StartExample, runners: int) -> None:
    few = (*FEW[:3], "data.train.num_samples=100", "data.validation.num_samples=8", "grpo.max_val_samples=8")
    changes = (*few, "grpo.val_batch_size=8", "grpo.max_num_steps=2")
    run = start_example(
        "run_vlm_grpo.py",
        CONFIG,
        *changes,
        f"cluster.rollout_runners={runners}",
        "grpo.val_at_start=true",
        NO_CHECKPOINT,
    )
    assert run.finish() == 0, run.log()[-3000:]
    folder = run.log_dir / "exp_001"
    lines = [json.loads(line) for path in folder.glob("*_data_step*.jsonl") for line in path.read_text().splitlines()]
    digests = {line["images"][0]["digest"] for line in lines}
    assert (len(lines), len(digests)) == (72, 16)
    assert {path.stem for path in (folder / "images").iterdir()} == digests
    assert {(*line["images"][0]["size"], *line["images"][0]["tokens"]) for line in lines} == {(28, 28, 7, 11)}
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert (page.count("data:image/png;base64,"), page.count("[image 1: 28x28, tokens 7 to 10]")) == (16, 72)
    config = str(REPOSITORY / "examples/configs" / CONFIG)
    assert main(["regrade", str(run.log_dir), "--config", config, *changes]) == 0
    regraded = [json.loads(line) for line in (folder / "regraded.jsonl").read_text().splitlines()]
    assert [line["reward"] for line in regraded] == [line["stored_reward"] for line in regraded] != []


@pytest.mark.long
def test_grpo_learns_to_count(start_example: StartExample) -> None:
    run = start_example("run_vlm_grpo.py", CONFIG, NO_CHECKPOINT)
    assert run.finish() == 0, run.log()[-3000:]
    metrics = read_metrics(run.log_dir)
    before, after = metrics["validation", 0, "accuracy"], metrics["validation", 40, "accuracy"]
    assert 0.35 < before < 0.6
    assert after > 0.8


@pytest.mark.long
def test_sft_learns_to_count_and_its_checkpoint_answers_in_transformers(
    start_example: StartExample, tmp_path: Path
) -> None:
    folder = tmp_path / "sft"
    run = start_example("run_vlm_sft.py", "sft_vlm_cpu.yaml", f"checkpointing.checkpoint_dir={folder}")
    assert run.finish() == 0, run.log()[-3000:]
    metrics = read_metrics(run.log_dir)
    assert metrics["validation", 60, "val_loss"] < 0.3 * metrics["validation", 0, "val_loss"]
    model_folder = folder / "step_60/policy/weights/model"
    processor = AutoProcessor.from_pretrained(model_folder)
    model = AutoModelForImageTextToText.from_pretrained(model_folder, dtype=torch.float32).eval()
    rows = ShapesRows("validation", 32, 5, None)
    right = 0
    for row, index in zip(rows, range(32), strict=True):
        pixels, _ = rows.draw(index)
        text = processor.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True)
        inputs = processor(text=[text], images=[Pictures.fromarray(pixels)], return_tensors="pt")
        made = model.generate(**inputs, max_new_tokens=1, do_sample=False)
        right += processor.tokenizer.decode(made[0, -1]) == row["answer"]
    assert right >= 24


@pytest.mark.long
def test_dpo_learns_from_pairs_with_images(start_example: StartExample, tmp_path: Path) -> None:
    """Rows name their images by paths next to the file."""
    lines = []
    for index, row in enumerate(ShapesRows("train", 600, 7, None)):
        path = tmp_path / "pictures" / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(row["messages"][0]["content"][0]["image"]["bytes"])
        image = {"type": "image", "image": f"pictures/{index}.png"}
        asked = {"role": "user", "content": [image, {"type": "text", "text": QUESTION}]}
        wrong = "1" if row["answer"] != "1" else "4"
        lines.append(json.dumps({"prompt": [asked], "chosen": row["answer"], "rejected": wrong}))
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    overrides = (
        "dpo.max_num_steps=20",
        "dpo.val_period=20",
        "policy.model_name=examples/assets/tiny-vision",
        "+policy.tokenizer.use_processor=true",
        "data.train={dataset_name: BinaryPreferenceDataset, data_path: pairs.jsonl, split_validation_size: 0.1}",
        "data.validation=null",
        NO_CHECKPOINT,
    )
    run = start_example("run_dpo.py", "dpo_cpu.yaml", *overrides)
    assert run.finish() == 0, run.log()[-3000:]
    metrics = read_metrics(run.log_dir)
    assert metrics["validation", 20, "preference_loss"] < metrics["validation", 0, "preference_loss"] - 0.05
