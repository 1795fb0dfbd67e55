"""GRPO with LoRA end to end on the CPU: it learns, engines and trainer agree, a resumed run is exact."""

import json

import pytest
import torch
from example_runs import StartExample, finished, killed_and_resumed
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

CONFIG = "grpo_math_cpu.yaml"
LORA = (
    "policy.dtensor_cfg.lora_cfg.enabled=true",
    "policy.dtensor_cfg.lora_cfg.dim=16",
    "policy.optimizer.kwargs.lr=1e-3",
    "grpo.val_period=2",
    "loss_fn.reference_policy_kl_penalty=0.01",
    "checkpointing.save_period=4",
    "checkpointing.save_consolidated=true",
)


def test_grpo_with_lora_learns(start_example: StartExample, tmp_path) -> None:
    expected = finished(start_example, "run_grpo.py", CONFIG, (*LORA, "grpo.max_num_steps=8"), tmp_path)
    rewards = [expected["train", step, "reward"] for step in range(1, 9)]
    assert sum(rewards[4:]) / 4 > rewards[0] + 0.1, rewards
    assert expected["validation", 8, "accuracy"] > expected["validation", 0, "accuracy"] + 0.1
    assert max(expected["train", step, "token_mult_prob_error"] for step in range(1, 9)) < 1.01
    assert expected["train", 1, "kl_penalty"] == pytest.approx(0.0, abs=1e-6)
    assert expected["train", 8, "kl_penalty"] > 1e-5

    weights = tmp_path / "checkpoints/step_8/policy/weights"
    merged, handed_on = (AutoModelForCausalLM.from_pretrained(weights / f) for f in ("model", "model/consolidated"))
    assert all(torch.equal(merged.get_parameter(name), tensor) for name, tensor in handed_on.named_parameters())
    assert json.loads((weights / "adapter/adapter_config.json").read_text())["r"] == 16


@pytest.mark.long
def test_a_killed_run_resumes_bit_for_bit(start_example: StartExample, tmp_path) -> None:
    killed_and_resumed(start_example, "run_grpo.py", CONFIG, (*LORA, "grpo.max_num_steps=8"), tmp_path, steps=8)
