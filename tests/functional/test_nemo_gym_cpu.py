"""GRPO on rows of NeMo Gym, played by the calculator servers of the examples, and the collection of rollouts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from example_runs import StartExample, check_agent_steps, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "nemo_gym/run_grpo_nemo_gym.py"
CONFIG = "../nemo_gym/grpo_calculator_cpu.yaml"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides that name the rows."""
    folder = tmp_path_factory.mktemp("rows")
    subprocess.run([sys.executable, ROOT / "examples/nemo_gym/calculator_rows.py", folder], check=True, timeout=120)
    return tuple(f"data.{role}.data_path={folder / role}.jsonl" for role in ("train", "validation"))


def test_rollouts_of_the_validation_rows_are_collected(
    start_example: StartExample, rows: tuple[str, ...], tmp_path: Path
) -> None:
    few = tmp_path / "few.jsonl"
    lines = Path(rows[1].partition("=")[2]).read_text(encoding="utf-8").splitlines(keepends=True)
    few.write_text("".join(lines[:16]), encoding="utf-8")
    run = start_example(
        SCRIPT,
        CONFIG,
        rows[0],
        f"data.validation.data_path={few}",
        "env.nemo_gym.is_trajectory_collection=true",
        f"env.nemo_gym.log_dir={tmp_path}",
        "grpo.max_val_samples=4",  # a collection takes all rows
        "checkpointing.enabled=false",
    )
    assert run.finish() == 0, run.log()[-3000:]
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(results) == 16
    accuracy = read_metrics(run.log_dir)["validation", 0, "accuracy"]
    assert sum(result["reward"] for result in results) / 16 == pytest.approx(accuracy)
    for result in results:
        answers = [item for item in result["response"]["output"] if "generation_token_ids" in item]
        assert answers and all(
            len(item["generation_token_ids"]) == len(item["generation_log_probs"]) for item in answers
        )
    logs = "".join(
        path.read_text(errors="replace") for path in [*run.log_dir.rglob("*"), *tmp_path.iterdir()] if path.is_file()
    )
    assert "sk-" not in logs + run.log()
    assert run.survivors() == []


@pytest.mark.long
def test_the_policy_learns_to_use_a_tool_of_nemo_gym(start_example: StartExample, rows: tuple[str, ...]) -> None:
    """The starting model is right in 0.28 of 128 problems; three standard errors of a share are 0.12."""
    run = start_example(SCRIPT, CONFIG, *rows, "grpo.max_num_steps=10", "checkpointing.enabled=false")
    assert run.finish(800) == 0, run.log()[-3000:]
    metrics = check_agent_steps(run, 10)
    before, after = (metrics["validation", step, "accuracy"] for step in (0, 10))
    assert after > before + 0.2
    assert metrics["train", 1, "nemo_gym/calculator_calls"] > 0
