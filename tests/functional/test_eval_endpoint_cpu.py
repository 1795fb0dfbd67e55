"""An evaluation of a model that vLLM's own server has, against one by engines of the run."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from example_runs import REPOSITORY, run_eval

from nemo_rl.models.generation.registry import engine_kind

pytestmark = [
    *(pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm),
    pytest.mark.timeout(900),
]

GREEDY = ("generation.temperature=0.0", "eval.num_tests_per_prompt=1", "data.num_samples=32")
_START_S = 300.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Address of vLLM's server with the tiny model."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    command += [str(REPOSITORY / "examples/assets/tiny-chat"), "--served-model-name", "tiny", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "128", "--enforce-eager"]
    # One GiB of cache; vLLM would take a share of the machine's memory.
    variables = {**os.environ, **engine_kind("vllm").environment("cpu"), "VLLM_CPU_KVCACHE_SPACE": "1"}
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=output, start_new_session=True)
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_for(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(url, timeout=2).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")


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
