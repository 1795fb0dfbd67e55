"""Evaluation end to end on the CPU: Ray, vLLM, environment; then again, and of an exported checkpoint."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from example_runs import REPOSITORY, GRPOExample, run_environment

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

CONFIG = "examples/configs/evals/eval_cpu.yaml"


def run(folder: Path, script: str, *arguments: str) -> tuple[int, str, float]:
    """Run an example script; returns status, output and seconds."""
    started = time.monotonic()
    command = [sys.executable, str(REPOSITORY / "examples" / script), *arguments]
    done = subprocess.run(command, cwd=folder, env=run_environment(), capture_output=True, text=True, timeout=280)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - started


def run_eval(folder: Path, *overrides: str) -> tuple[int, str, float]:
    return run(folder, "run_eval.py", "--config", CONFIG, *overrides)


def test_evaluates_and_goes_on_and_refuses(tmp_path: Path) -> None:
    status, output, _ = run_eval(tmp_path)
    assert status == 0, output[-3000:]
    assert "metric=pass@1 num_tests_per_prompt=4" in output
    results = json.loads((tmp_path / "results/eval_cpu/results.json").read_text())
    assert f"score={results['score']['value']:.4f} (" in output
    assert results["score"]["num_prompts"] == 64
    assert 0.3 < results["score"]["value"] < 0.6  # the model's card says 0.436

    records = tmp_path / "results/eval_cpu/evaluation_data.jsonl"
    whole = records.read_bytes()
    status, output, _ = run_eval(tmp_path)
    assert status == 0, output[-3000:]
    assert "after 64 of 64 prompts" in output
    assert "Ray started" not in output
    assert records.read_bytes() == whole

    lines = whole.splitlines(keepends=True)
    records.write_bytes(b"".join(lines[: 4 * 40 + 3]))
    status, output, _ = run_eval(tmp_path, "generation.num_prompts_per_step=-1")
    assert status == 0, output[-3000:]
    assert "after 40 of 64 prompts" in output
    assert [json.loads(line)["response"] for line in records.read_bytes().splitlines()] == [
        json.loads(line)["response"] for line in lines
    ]

    status, output, _ = run_eval(tmp_path, "generation.temperature=0.9")
    assert status == 2
    assert "generation.temperature was 1.0 and is 0.9" in output


def test_a_trained_checkpoint_is_exported_and_evaluated(grpo_example: GRPOExample, tmp_path: Path) -> None:
    step = grpo_example.checkpoint
    status, output, _ = run(
        tmp_path,
        "converters/convert_dcp_to_hf.py",
        f"--config={step}/config.yaml",
        f"--dcp-ckpt-path={step}/policy/weights",
        "--hf-ckpt-path=hf",
        "--verify",
    )
    assert status == 0, output[-3000:]
    assert float(output.split("log-probabilities: ")[1].split()[0]) <= 1e-6

    status, output, _ = run_eval(tmp_path, "generation.model_name=hf", "eval.save_path=exported")
    assert status == 0, output[-3000:]
    assert json.loads((tmp_path / "exported/results.json").read_text())["score"]["value"] > 0.5
