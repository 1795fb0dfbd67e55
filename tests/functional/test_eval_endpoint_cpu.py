"""An evaluation of a model that vLLM's own server has, against one by engines of the run."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_runs import run_eval
from vllm_server import vllm_server

pytestmark = [
    *(pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm),
    pytest.mark.timeout(900),
]

GREEDY = ("generation.temperature=0.0", "eval.num_tests_per_prompt=1", "data.num_samples=32")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Address of vLLM's server with the tiny model."""
    with vllm_server(tmp_path) as address:
        yield address


def _records(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "evaluation_data.jsonl").read_text().splitlines()]


def test_greedy_answers_of_a_vllm_server_are_those_of_own_engines(server: str, tmp_path: Path) -> None:
    remote = (f"generation.endpoint.base_url={server}", "generation.endpoint.model=tiny")
    status, output = run_eval(tmp_path, *GREEDY, *remote, "eval.save_path=remote", "cluster.device=cuda")
    assert status == 0, output[-3000:]
    assert "model_name='tiny'" in output and f"endpoint={server}" in output
    assert "GenerationWorker" not in output and "32 answers, 0 without an answer" in output
    status, output = run_eval(tmp_path, *GREEDY, "eval.save_path=own")
    assert status == 0, output[-3000:]
    theirs, ours = _records(tmp_path / "remote"), _records(tmp_path / "own")
    for left, right in zip(theirs, ours, strict=True):
        assert {**left, "prompt": ""} == {**right, "prompt": ""}
    assert sum(record["reward"] == 1.0 for record in ours) in range(4, 29)

    lines = (tmp_path / "remote/evaluation_data.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "remote/evaluation_data.jsonl").write_text("".join(lines[:16]))
    status, output = run_eval(tmp_path, *GREEDY, *remote, "eval.save_path=remote", "cluster.device=cuda")
    assert status == 0 and "after 16 of 32 prompts" in output, output[-3000:]
    assert _records(tmp_path / "remote") == theirs
