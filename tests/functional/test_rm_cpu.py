"""A reward model end to end on the CPU: it learns, resumes bit for bit, and loads as a sequence classifier."""

import pytest
import torch
from example_runs import StartExample, finished
from supervised_runs import run_and_resume, run_once
from transformers import AutoModelForSequenceClassification, AutoTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]


def test_a_reward_model_learns_and_loads_as_a_sequence_classifier(start_example: StartExample, tmp_path) -> None:
    metrics = run_once(start_example, "rm", 40, tmp_path)
    losses = [metrics["validation", step, "loss"] for step in (0, 20, 40)]
    assert losses[0] > losses[1] > losses[2]
    # The share of 128 correctly ordered pairs is coarse and differs between processors; their margin does not.
    margins = [metrics["validation", step, "rewards_margin_mean"] for step in (0, 20, 40)]
    assert margins[0] < 0.1 and margins[0] + 0.1 < margins[1] and margins[1] + 0.2 < margins[2]
    assert metrics["validation", 40, "accuracy"] >= metrics["validation", 0, "accuracy"]
    assert 0 <= metrics["validation", 40, "calibration_error"] < 0.3

    folder = tmp_path / "checkpoints/step_40/policy/weights/model"
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    answers = ["7+5=12;30+80=110;12+110=122", "7+5=13;30+80=110;12+110=122"]
    chats = [[{"role": "user", "content": "37+85="}, {"role": "assistant", "content": text}] for text in answers]
    batch = tokenizer.apply_chat_template(chats, return_tensors="pt", padding=True, return_dict=True)
    with torch.no_grad():
        right, wrong = model(**batch).logits[:, 0].tolist()
    assert right != wrong


@pytest.mark.long
def test_a_killed_run_resumes_bit_for_bit(start_example: StartExample, tmp_path) -> None:
    run_and_resume(start_example, "rm", 20, tmp_path)


def test_a_reward_model_learns_two_scores(start_example: StartExample, tmp_path) -> None:
    overrides = ("rm.max_num_steps=60", "rm.val_period=30", "checkpointing.save_period=60")
    metrics = finished(start_example, "run_rm.py", "rm_regression_cpu.yaml", overrides, tmp_path)
    losses = [metrics["validation", step, "loss"] for step in (0, 30, 60)]
    assert losses[0] > 5 and losses[2] < 0.4 * losses[0]
    assert metrics["validation", 60, "pearson_completeness"] > 0.5
    assert metrics["validation", 60, "mae_completeness"] < metrics["validation", 0, "mae_completeness"] / 2
    folder = tmp_path / "checkpoints/step_60/policy/weights/model"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.id2label == {0: "correctness", 1: "completeness"}


def test_a_process_reward_model_learns_labels_of_steps(start_example: StartExample, tmp_path) -> None:
    overrides = ("rm.max_num_steps=60", "rm.val_period=30", "checkpointing.save_period=60")
    metrics = finished(start_example, "run_rm.py", "rm_process_cpu.yaml", overrides, tmp_path)
    losses = [metrics["validation", step, "loss"] for step in (0, 30, 60)]
    assert losses[0] > losses[1] > losses[2]
    assert 0 <= metrics["validation", 60, "first_error_f1"] <= 1
    folder = tmp_path / "checkpoints/step_60/policy/weights/model"
    assert AutoModelForSequenceClassification.from_pretrained(folder).config.num_labels == 1


def test_a_reward_model_learns_with_adapters(start_example: StartExample, tmp_path) -> None:
    adapters = ("policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=16")
    overrides = (*adapters, "policy.optimizer.kwargs.lr=3e-3", "rm.max_num_steps=40", "rm.val_period=20")
    metrics = finished(
        start_example, "run_rm.py", "rm_cpu.yaml", (*overrides, "checkpointing.save_period=40"), tmp_path
    )
    losses = [metrics["validation", step, "loss"] for step in (0, 40)]
    assert losses[1] < losses[0] - 0.02
    weights = tmp_path / "checkpoints/step_40/policy/weights"
    assert (weights / "adapter/adapter_model.safetensors").exists()
    AutoModelForSequenceClassification.from_pretrained(weights / "model")
