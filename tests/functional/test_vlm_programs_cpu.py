"""Programs and tools that give a policy further images, trained end to end on the CPU."""

import json
from pathlib import Path

import pytest
from example_runs import StartExample, read_metrics

pytest.importorskip("torchvision")
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

CONFIG = "vlm_grpo_cpu.yaml"
ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "policy.train_global_batch_size=16",
    "policy.max_total_sequence_length=256",
    "policy.train_micro_batch_size=16",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.max_num_steps=2",
    "checkpointing.enabled=false",
)
AGENT = (
    "data.default.env_name=agent",
    "+env.agent={program: image_agent.solve, grader: {name: math, kwargs: {num_workers: 1}}}",
)


def test_a_program_sends_images_in_several_turns(start_example: StartExample) -> None:
    run = start_example(
        "run_vlm_grpo.py",
        CONFIG,
        *SMALL,
        *AGENT,
        environment={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/functional'}"},
    )
    assert run.finish() == 0, run.log()[-3000:]
    metrics = read_metrics(run.log_dir)
    for step in (1, 2):
        assert metrics["train", step, "token_mult_prob_error"] < 1.001
        assert metrics["train", step, "num_agent_refused"] == 0
        assert metrics["train", step, "num_agent_unlike_template"] == 0
        assert metrics["train", step, "mean_branches_per_sample"] == 0
    (stored,) = run.log_dir.rglob("train_data_step1.jsonl")
    samples = [json.loads(line) for line in stored.read_text().splitlines()]
    assert len(samples) == 16
    for sample in samples:
        digests = [image["digest"] for image in sample["images"]]
        assert len(set(digests)) == 3
        assert [turn["role"] for turn in sample["content"]].count("assistant") == 3
