"""The Dockerfile copies existing files that are not ignored, ends without root and labels the image."""

import fnmatch
import os
import re
from pathlib import PurePosixPath

import pytest
from manifests import ROOT

pytestmark = pytest.mark.fast

DOCKERFILE = ROOT / "docker/Dockerfile"
VARIANTS = ("gpu", "cpu")


def instructions() -> list[tuple[str, str]]:
    """Return name and argument of each instruction, without comments and continued lines."""
    lines = [line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = [line.partition(" ") for line in joined.splitlines() if line]
    return [(name, argument) for name, _, argument in found]


def test_a_build_from_the_root_uses_the_same_file():
    """`docker build .` reads the link in the root; it cannot go stale, and both names are linted."""
    at_root = ROOT / "Dockerfile"
    assert at_root.is_symlink() and os.readlink(at_root) == "docker/Dockerfile"
    linted = next(line for line in (ROOT / ".ci/run").read_text().splitlines() if "hadolint" in line).split()
    assert linted[-2:] == ["Dockerfile", "docker/Dockerfile"]


def is_ignored(path: str) -> bool:
    """Return whether .dockerignore ignores a file or one of its folders; it has no exceptions (`!`)."""
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert not any(pattern.startswith("!") for pattern in patterns)
    parts = [path, *map(str, PurePosixPath(path).parents)]
    at_root = [pattern for pattern in patterns if not pattern.startswith("**/")]
    anywhere = [pattern.removeprefix("**/") for pattern in patterns if pattern.startswith("**/")]
    return any(fnmatch.fnmatch(part, pattern) for part in parts for pattern in at_root) or any(
        fnmatch.fnmatch(name, pattern) for name in PurePosixPath(path).parts for pattern in anywhere
    )


def test_every_copied_path_exists():
    sources = [argument.split()[-2] for name, argument in instructions() if name == "COPY" and "--from" not in argument]
    assert sources == [".", "requirements/${VARIANT}.txt"]
    files = [source.replace("${VARIANT}", variant) for source in sources[1:] for variant in VARIANTS]
    assert [file for file in files if not (ROOT / file).is_file() or is_ignored(file)] == []


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        ("pyproject.toml", False),
        ("README.md", False),
        ("LICENSE", False),
        ("nemo_rl/__init__.py", False),
        ("examples/configs/grpo_math_cpu.yaml", False),
        ("examples/assets/tiny-chat/config.json", False),
        ("infra/kubernetes/stop_run.sh", False),
        (".git/config", True),
        (".venv/bin/python", True),
        ("results/grpo/step_1/config.yaml", True),
        ("nemo_rl/__pycache__/a.pyc", True),
        ("examples/.env", True),
        ("tests/conftest.py", True),
    ],
)
def test_the_image_holds_the_project_and_nothing_of_its_runs(path, ignored):
    assert is_ignored(path) is ignored


def test_stages_and_arguments_have_their_documented_names():
    stages = [argument.partition(" AS ")[2] for name, argument in instructions() if name == "FROM"]
    assert stages == ["nemo-rl", "base", "hermetic", "release"]
    arguments = {argument.partition("=")[0] for name, argument in instructions() if name == "ARG"}
    assert {"BASE_IMAGE", "UV_VERSION", "PYTHON_VERSION", "MAX_JOBS", "NRL_GIT_REF", "NEMO_RL_COMMIT"} <= arguments
    assert "/opt/nemo_rl_venv" in DOCKERFILE.read_text() and "/opt/ray_venvs" in DOCKERFILE.read_text()


def test_the_image_runs_without_root_and_records_versions():
    last_user = [argument for name, argument in instructions() if name == "USER"][-1]
    assert last_user.isdecimal() and int(last_user) > 0
    text = DOCKERFILE.read_text()
    assert re.search(r"^ARG BASE_IMAGE=\S+:[\w.-]*\d[\w.-]*$", text, flags=re.MULTILINE)
    assert re.search(r"^ARG UV_VERSION=\d+\.\d+\.\d+$", text, flags=re.MULTILINE)
    assert "--require-hashes" in text and not any(name == "ADD" for name, _ in instructions())
    assert text.count("apt-get update") == text.count("rm -rf /var/lib/apt/lists/*") == 1
