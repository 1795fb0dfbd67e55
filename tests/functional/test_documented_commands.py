"""Run every CPU command of the pages in page order and in one folder, as a reader types them."""

import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_runs import REPOSITORY, run_environment

log = logging.getLogger(__name__)

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(7200)]

NOT_RUN = ("--extra vllm", "pytest", "sphinx-build", "tools/benchmarks/", "uv sync", "pre-commit")
"""GPU commands, the test suite itself, the site, side-by-side timings (which install another library) and set-up."""
TRAINING = re.compile(r"python examples/run_(?!eval)\w+\.py")
RESUMES = "checkpointing.checkpoint_dir=results/checkpoints "
"""The folder in which a page resumes on purpose; every other command has a folder of its own."""
LIMIT_S = 600


def pages() -> Iterator[Path]:
    """Return README, the pages in the order of the table of contents, and CONTRIBUTING.

    The use cases are left out: `test_use_cases_cpu.py` runs them, and looks at what they improve.
    """
    yield REPOSITORY / "README.md"
    index = REPOSITORY / "docs/README.md"
    for target in re.findall(r"\]\(([\w./-]+\.md)\)", index.read_text(encoding="utf-8")):
        if not target.startswith("use-cases/"):
            yield index.parent / target
    yield REPOSITORY / "CONTRIBUTING.md"


def documented_commands() -> list[str]:
    """Return each command of the `sh` blocks once, without those of `NOT_RUN`."""
    commands: dict[str, None] = {}
    for page in pages():
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE):
            lines = re.sub(r" *\\\n *", " ", block).splitlines()
            commands |= dict.fromkeys(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    return [command for command in commands if not any(part in command for part in NOT_RUN)]


def as_installed(command: str) -> str:
    """Return the command for the environment of this test: without installation and `uv run`, which starts scripts."""
    command = command.removeprefix("pip install uv && ")
    options = r"uv run (--extra \w+ |--group \w+ )*"
    return re.sub(options, "", re.sub(rf"{options}(?=\S+\.py\b)", "python ", command))


def failure_of(command: str, folder: Path, environment: dict[str, str]) -> str | None:
    """Run one command in `folder`; return what it printed if it failed, `None` if it did what its page says."""
    try:
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"{command}\nstill ran after {LIMIT_S} s"
    printed = done.stdout + done.stderr
    trains = TRAINING.search(command) and "--dry-run" not in command
    resumed = "Resuming from" in printed and RESUMES not in command
    if done.returncode == 0 and not (trains and (resumed or "First training step done" not in printed)):
        return None
    return f"{command}\nexit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"


def test_every_documented_command_runs_in_page_order(tmp_path: Path) -> None:
    commands = list(dict.fromkeys(map(as_installed, documented_commands())))
    assert len(commands) > 20
    for part in ("examples", "infra", "tools"):
        shutil.copytree(REPOSITORY / part, tmp_path / part)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = run_environment() | {"PATH": path}
    failures = []
    for number, command in enumerate(commands, 1):
        start = time.monotonic()
        failure = failure_of(command, tmp_path, environment)
        log.info("%d of %d, %.0f s: %s", number, len(commands), time.monotonic() - start, command)
        failures += [failure] if failure else []
    assert not failures, "\n\n".join(failures)
