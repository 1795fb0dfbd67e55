"""Run examples and tests of the packages openai and anthropic against the endpoint for agent programs.

    pip download --no-deps --no-binary :all: openai==3.56.0 anthropic==2.11.0
    uv run --extra cpu --group test python tools/endpoint_conformance.py openai-3.56.0.tar.gz anthropic-2.11.0.tar.gz

The source archives of the packages hold example programs, and that of openai tests that call every method of an API,
with and without all its parameters, and check the types of what comes back. An evaluation runs each chosen file as one
sample of an environment with agents, over vLLM and the model with tools of this repository. The model answers nonsense,
so a file fails where the endpoint does, and where an example needs a sensible answer. Prints a Markdown table.
"""

import argparse
import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_rl.agents.programs.interfaces import AgentTask

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "CONFORMANCE_RESULTS"
"""Environment variable with the folder that the program writes its results to."""
KEY = "CONFORMANCE_KEY"
"""Environment variable with the key of the session, for the tests of a package."""
CASE_LIMIT_S = 240
EVAL_LIMIT_S = 3600


@dataclass(frozen=True)
class Case:
    """A file of an archive.

    Attributes:
        path: the file, below the archive's folder.
        chosen: which of its tests apply, as an expression of pytest's `-k`; None for an example.
        without: why the others do not apply.
    """

    path: str
    chosen: str | None = None
    without: str = ""


OPENAI = (
    Case("examples/demo.py"),
    Case("examples/async_demo.py"),
    Case("examples/streaming.py"),
    Case("examples/httpx2_client.py"),
    Case("examples/parsing.py"),
    Case("examples/parsing_stream.py"),
    Case("examples/parsing_tools.py"),
    Case("examples/parsing_tools_stream.py"),
    Case("examples/responses/streaming.py"),
    Case("examples/responses/streaming_tools.py"),
    Case("examples/responses/structured_outputs.py"),
    Case("examples/responses/structured_outputs_tools.py"),
    Case("tests/api_resources/chat/test_completions.py", "create", "stored completions"),
    Case("tests/api_resources/test_completions.py", "create"),
    Case("tests/api_resources/test_models.py", "list or retrieve", "deletion"),
)
ANTHROPIC = (
    Case("examples/messages.py"),
    Case("examples/messages_stream.py"),
    Case("examples/message_threads.py"),
    Case("examples/structured_outputs.py"),
    Case("examples/structured_outputs_streaming.py"),
    Case("examples/thinking.py"),
    Case("examples/thinking_stream.py"),
    Case("examples/tools.py"),
    Case("examples/tools_runner.py"),
    Case("examples/tools_stream.py"),
)
CASES = {"openai": OPENAI, "anthropic": ANTHROPIC}


async def run_case(task: AgentTask) -> dict[str, Any]:
    """Run the file that the task names; a program of `env.agent.program`.

    The reward is the share of its tests that passed. Outcomes are also written to the folder `RESULTS`.
    """
    case = json.loads(task.messages[-1]["content"])
    folder, path = Path(case["folder"]), case["path"]
    address, key = task.base_url, task.api_key
    environment = os.environ | {
        "OPENAI_BASE_URL": address,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": address.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        "PYTHONPATH": str(folder),
    }
    if case["chosen"] is None:
        command = [sys.executable, path]
    else:
        environment["TEST_API_BASE_URL"] = address if case["package"] == "openai" else address.removesuffix("/v1")
        environment |= {KEY: key, "COLUMNS": "400"}  # columns: so that pytest prints whole messages
        options = ["-q", "-rf", "--tb=no", "-p", "no:cacheprovider", "-o", "addopts="]
        command = [sys.executable, "-m", "pytest", path, "-k", case["chosen"], *options]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output = (await asyncio.wait_for(process.communicate(), CASE_LIMIT_S))[0].decode(errors="replace")
    except TimeoutError:
        process.kill()
        await process.wait()
        output = f"no end after {CASE_LIMIT_S} s"
    passed, total = outcome(output, process.returncode, is_tests=case["chosen"] is not None)
    result = case | {"passed": passed, "total": total, "output": output[-8000:]}
    name = re.sub(r"\W", "_", f"{case['package']}_{path}")
    await asyncio.to_thread(Path(os.environ[RESULTS], f"{name}.json").write_text, json.dumps(result), "utf-8")
    return {"reward": passed / max(total, 1)}


def outcome(output: str, status: int | None, *, is_tests: bool) -> tuple[int, int]:
    """Return how many tests passed, and of how many; an example is one test."""
    if not is_tests:
        return int(status == 0), 1
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", output)}
    return counts.get("passed", 0), sum(counts.values())


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a source archive and return its folder; tests of it get the key of their session."""
    with tarfile.open(archive) as content:
        content.extractall(folder, filter="data")
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    settings = unpacked / "tests/conftest.py"
    content_with_key = re.sub(r"(?m)^api_key = .*$", f'api_key = os.environ["{KEY}"]', settings.read_text("utf-8"))
    settings.write_text(content_with_key, encoding="utf-8")
    return unpacked


def evaluate(cases: list[dict[str, Any]], folder: Path) -> None:
    """Run an evaluation with one sample for each file."""
    rows = folder / "cases.jsonl"
    lines = [json.dumps({"problem": json.dumps(case), "answer": "passed"}) + "\n" for case in cases]
    rows.write_text("".join(lines), encoding="utf-8")
    overrides = {
        "generation.model_name": "examples/assets/tiny-tools",
        "generation.vllm_cfg.max_model_len": 8192,
        "+generation.vllm_kwargs.hf_overrides.max_position_embeddings": 8192,
        "generation.max_new_tokens": 1024,
        "generation.temperature": 1.0,
        "eval.num_tests_per_prompt": 1,
        "eval.save_path": "null",
        "data.dataset_name": rows,
        "+data.problem_key": "problem",
        "+data.solution_key": "answer",
        "+data.env_name": "agent",
        "~env.math": None,
        "+env.agent.program": "endpoint_conformance.run_case",
        "+env.agent.tool_parser": "pythonic",
        "+env.agent.timeout_s": CASE_LIMIT_S + 30,
    }
    command = [sys.executable, "examples/run_eval.py", "--config", "examples/configs/evals/eval_cpu.yaml"]
    command += [key if value is None else f"{key}={value}" for key, value in overrides.items()]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}", RESULTS: str(folder)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=EVAL_LIMIT_S)


def main() -> None:
    """Run the chosen files of each archive, and print how many passed."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("archives", nargs="+", type=Path, help="openai-VERSION.tar.gz, anthropic-VERSION.tar.gz")
    parser.add_argument("--keep", type=Path, help="folder for the outputs of the files; default: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        cases = []
        for archive in arguments.archives:
            package, unpacked = archive.name.partition("-")[0], unpack(archive, folder)
            cases += [asdict(case) | {"package": package, "folder": str(unpacked)} for case in CASES[package]]
        evaluate(cases, folder)
        logger.info("| package | file | passed | of | left out |\n|---|---|---:|---:|---|")
        for path in sorted(folder.glob("*.json")):
            result = json.loads(path.read_text(encoding="utf-8"))
            columns = (result[key] for key in ("package", "path", "passed", "total", "without"))
            logger.info("| %s |", " | ".join(map(str, columns)))


if __name__ == "__main__":
    main()
