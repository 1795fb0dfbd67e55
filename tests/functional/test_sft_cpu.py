"""SFT end to end on the CPU: the validation loss falls, a killed run goes on bit for bit."""

import pytest
from example_runs import StartExample
from supervised_runs import run_and_resume
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]


def test_learns_and_resumes_bit_for_bit(start_example: StartExample, tmp_path) -> None:
    metrics = run_and_resume(start_example, "sft", 20, tmp_path)
    losses = [metrics["validation", step, "val_loss"] for step in (0, 10, 20)]
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < 0.5 * losses[0]
    AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints/step_20/policy/weights/model")
