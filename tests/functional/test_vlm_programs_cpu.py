"""Programs and tools that give a policy further images, trained end to end on the CPU."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from example_runs import StartExample, read_metrics
from tiny_vision_models import QWEN_TOOLS_TEMPLATE

from nemo_rl.data.datasets.rows.shapes import ShapesRows

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
        assert ("train", step, "mean_branches_per_sample") not in metrics
    (stored,) = run.log_dir.rglob("train_data_step1.jsonl")
    samples = [json.loads(line) for line in stored.read_text().splitlines()]
    assert len(samples) == 16
    for sample in samples:
        digests = [image["digest"] for image in sample["images"]]
        assert len(set(digests)) == 3
        assert [turn["role"] for turn in sample["content"]].count("assistant") == 3


@pytest.mark.long
def test_demanded_forms_are_scored_with_images_and_odd_requests_cost_themselves_only(
    start_example: StartExample,
) -> None:
    run = start_example(
        "run_vlm_grpo.py",
        CONFIG,
        *SMALL,
        *AGENT,
        "env.agent.program=image_agent.choose",
        environment={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/functional'}"},
    )
    assert run.finish() == 0, run.log()[-3000:]
    metrics = read_metrics(run.log_dir)
    for step in (1, 2):
        assert metrics["train", step, "token_mult_prob_error"] < 1.001
        assert metrics["train", step, "num_agent_constrained_tokens"] >= 16
        assert 3 <= metrics["train", step, "agent/refused"] <= 5


@pytest.mark.long
def test_a_tool_returns_images(start_example: StartExample, tmp_path: Path) -> None:
    """A model that was taught to look once more calls a tool, whose pictures it reads."""
    template = tmp_path / "template.jinja"
    template.write_text(QWEN_TOOLS_TEMPLATE)
    lines = [json.dumps(lesson(row)) for row in ShapesRows("train", 1500, 7, None)]
    (tmp_path / "lessons.jsonl").write_text("\n".join(lines))
    taught = start_example(
        "run_vlm_sft.py",
        "sft_vlm_cpu.yaml",
        "data.train={dataset_name: openai_format, data_path: lessons.jsonl, split_validation_size: 0.05}",
        "data.validation=null",
        f"policy.tokenizer.chat_template={template}",
        "policy.max_total_sequence_length=160",
        "sft.max_num_steps=80",
        "checkpointing.save_period=80",
        f"checkpointing.checkpoint_dir={tmp_path}/taught",
        logs="taught",
    )
    assert taught.finish(400) == 0, taught.log()[-3000:]
    run = start_example(
        "run_vlm_grpo.py",
        CONFIG,
        *SMALL,
        f"policy.model_name={tmp_path}/taught/step_80/policy/weights/model",
        f"policy.tokenizer.chat_template={template}",
        "policy.generation.max_new_tokens=12",
        "grpo.max_rollout_turns=3",
        "data.default.env_name=tools",
        "+env.tools={tools: [{name: looking_tools.Look}], grader: {name: math, kwargs: {num_workers: 1}}}",
        environment={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/functional'}"},
    )
    assert run.finish() == 0, run.log()[-3000:]
    metrics = read_metrics(run.log_dir)
    for step in (1, 2):
        assert metrics["train", step, "token_mult_prob_error"] < 1.001
        assert metrics["train", step, "tools/tool_calls"] >= 8
        assert metrics["train", step, "tools/tool_errors"] == 0
    (stored,) = run.log_dir.rglob("train_data_step1.jsonl")
    samples = [json.loads(line) for line in stored.read_text().splitlines()]
    # A call that cannot be read has an error as its result, without a picture.
    shown = [[turn["content"] for turn in sample["content"]].count("<image>Once more.") for sample in samples]
    assert [len(sample["images"]) for sample in samples] == [1 + count for count in shown]
    assert sum(shown) >= 8


def lesson(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with a call of the tool between the question and the answer."""
    question, answer = row["messages"]
    encoded = question["content"][0]["image"]["bytes"]
    part = {"type": "image", "image": f"data:image/png;base64,{base64.b64encode(encoded).decode()}"}
    function = {"name": "look", "arguments": "{}"}
    call = {"id": "call00000", "type": "function", "function": function}
    spec = {"name": "look", "description": "Show.", "parameters": {"type": "object", "properties": {}}}
    messages = [
        {"role": "user", "content": [part, question["content"][1]]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "content": [part, {"type": "text", "text": "Once more."}]},
        answer,
    ]
    return {"messages": messages, "tools": [{"type": "function", "function": spec}]}
