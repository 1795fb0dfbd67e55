"""vLLM's own OpenAI-compatible server with a tiny model, on the CPU."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from example_runs import REPOSITORY

from nemo_rl.models.generation.registry import engine_kind

_START_S = 300.0


@contextmanager
def vllm_server(folder: Path, model: str = "examples/assets/tiny-chat") -> Iterator[str]:
    """Yield the address of a server that has a model under the name "tiny"."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    command += [str(REPOSITORY / model), "--served-model-name", "tiny", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "128", "--enforce-eager"]
    # One GiB of cache; vLLM would take a share of the machine's memory.
    variables = {**os.environ, **engine_kind("vllm").environment("cpu"), "VLLM_CPU_KVCACHE_SPACE": "1"}
    log = folder / "server.log"
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
