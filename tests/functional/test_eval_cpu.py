"""Evaluation end to end on the CPU with Ray, vLLM and an environment; then started again."""

import json
from pathlib import Path

import pytest
from example_runs import run_eval

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]


def test_an_evaluation_is_scored_resumed_and_refused_after_a_change(tmp_path: Path) -> None:
    status, output = run_eval(tmp_path)
    assert status == 0, output[-3000:]
    assert "metric=pass@1 num_tests_per_prompt=4" in output
    results = json.loads((tmp_path / "results/eval_cpu/results.json").read_text())
    assert f"score={results['score']['value']:.4f} (" in output
    assert results["score"]["num_prompts"] == 64
    assert 0.3 < results["score"]["value"] < 0.6  # the model's card says 0.436

    records = tmp_path / "results/eval_cpu/evaluation_data.jsonl"
    whole = records.read_bytes()
    status, output = run_eval(tmp_path)
    assert status == 0, output[-3000:]
    assert "after 64 of 64 prompts" in output
    assert "Ray started" not in output
    assert records.read_bytes() == whole

    lines = whole.splitlines(keepends=True)
    records.write_bytes(b"".join(lines[: 4 * 40 + 3]))
    status, output = run_eval(tmp_path, "generation.num_prompts_per_step=-1")
    assert status == 0, output[-3000:]
    assert "after 40 of 64 prompts" in output
    assert [json.loads(line)["response"] for line in records.read_bytes().splitlines()] == [
        json.loads(line)["response"] for line in lines
    ]

    status, output = run_eval(tmp_path, "generation.temperature=0.9")
    assert status == 2
    assert "generation.temperature was 1.0 and is 0.9" in output
