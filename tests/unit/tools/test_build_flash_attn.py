"""The script that compiles flash-attn into uv's cache, up to the compilation, with fake uv and nvcc."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "tools/build-flash-attn-in-uv-cache.sh"
LOCK = '[[package]]\nname = "cuda-bindings"\nversion = "13.4.4"\n'


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "tools").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "uv.lock").write_text(LOCK)
    put(tmp_path / "bin/uv", f'echo "MAX_JOBS=$MAX_JOBS uv $*" >> {tmp_path}/calls; exit 3')
    return Path(shutil.copy(SCRIPT, tmp_path / "tools"))


def put(path: Path, lines: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{lines}\n")
    path.chmod(0o755)


def run(script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{script.parents[1]}/bin:/usr/bin:/bin", "TMPDIR": str(script.parents[1]), **variables}
    return subprocess.run([str(script), *arguments], env=environment, capture_output=True, text=True)


def cuda(script: Path, release: str) -> str:
    home = script.parents[1] / "cuda"
    home.mkdir(exist_ok=True)
    put(home / "bin/nvcc", f'echo "Cuda compilation tools, release {release}, V{release}.1"')
    return str(home)


def test_a_dry_run_prints_the_commands_and_calls_nothing(script, tmp_path):
    done = run(script, "--dry-run", MAX_JOBS="3")
    assert done.returncode == 0 and not (tmp_path / "calls").exists()
    lock, sync, check = done.stdout.splitlines()
    assert lock.split() == ["uv", "lock"]
    assert "UV_PROJECT_ENVIRONMENT=" in sync and sync.split()[-2:] == ["--extra", "flash-attn"]
    assert "flash_attn" in check and "3 compilers" in done.stderr


def test_the_number_of_compilers_fits_the_machine(script):
    number = int(run(script, "--dry-run").stderr.split(" with ")[1].split()[0])
    assert 1 <= number <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("arguments", "variables", "reason"),
    [
        (("--dry",), {}, "unknown argument --dry"),
        (("--dry-run", "x"), {}, "too many arguments"),
        (("--dry-run",), {"MAX_JOBS": "many"}, "MAX_JOBS=many is not a number"),
        ((), {"CUDA_HOME": "/no/such"}, "there is no /no/such/bin/nvcc"),
    ],
)
def test_unsupported_builds_are_refused(script, tmp_path, arguments, variables, reason):
    put(tmp_path / "bin/uv", "exit 0")
    done = run(script, *arguments, **variables)
    assert done.returncode == 1 and reason in done.stderr


def test_a_toolkit_of_another_cuda_is_refused(script, tmp_path):
    put(tmp_path / "bin/uv", f'echo "$1" >> {tmp_path}/calls; [ "$1" != sync ] || exit 3')
    done = run(script, CUDA_HOME=cuda(script, "12.8"))
    assert done.returncode == 1 and "is of CUDA 12, but torch is built for CUDA 13" in done.stderr
    assert run(script, CUDA_HOME=cuda(script, "13.0")).returncode == 3
    assert (tmp_path / "calls").read_text().split() == ["lock", "lock", "sync"]


def test_a_missing_uv_is_named(script, tmp_path):
    (tmp_path / "bin/uv").unlink()
    done = run(script, "--dry-run")
    assert done.returncode == 1 and "pip install uv" in done.stderr
