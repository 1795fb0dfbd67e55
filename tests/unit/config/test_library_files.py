"""Base configurations and tiny models are found by name from any folder, in a checkout and in a wheel."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nemo_rl.config import REPOSITORY_ROOT, SFTMasterConfig, find_path, load_config
from nemo_rl.config.base.paths import library_file
from nemo_rl.launch.programs import PROGRAMS

pytestmark = pytest.mark.fast

EXAMPLES = REPOSITORY_ROOT / "examples"
WHEEL = tomllib.loads((REPOSITORY_ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("grpo_math_cpu.yaml", "configs/grpo_math_cpu.yaml"),
        ("eval_cpu.yaml", "configs/evals/eval_cpu.yaml"),
        ("tiny-chat", "assets/tiny-chat"),
        ("examples/prompts/cot.txt", "prompts/cot.txt"),
    ],
)
def test_names_of_the_library(name: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_path(name) == EXAMPLES / place


@pytest.mark.parametrize("name", ["", ".", "..", "configs/grpo_math_cpu.yaml", "nosuch.yaml", "Qwen/Qwen2.5-1.5B"])
def test_other_names_are_not_of_the_library(name: str) -> None:
    assert library_file(name) is None


def test_a_file_of_the_current_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft_cpu.yaml").write_text("defaults: sft.yaml\nsft: {seed: 9}\n")
    assert load_config("sft_cpu.yaml", schema=SFTMasterConfig).sft.seed == 9


def test_a_file_of_another_folder_inherits_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: grpo_math_cpu.yaml\ngrpo: {seed: 9}\n")
    config = load_config(tmp_path / "mine.yaml")
    assert (config.grpo.seed, config.policy.max_total_sequence_length) == (9, 128)
    (tmp_path / "grpo_math_cpu.yaml").write_text(
        f"defaults: {EXAMPLES}/configs/grpo_math_cpu.yaml\ngrpo: {{seed: 8}}\n"
    )
    (tmp_path / "next.yaml").write_text("defaults: grpo_math_cpu.yaml\n")
    assert load_config(tmp_path / "next.yaml").grpo.seed == 8


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_has_its_base_files(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = PROGRAMS[name]
    assert program.default_config.is_file()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert load_config(program.config_for_this_machine(), schema=program.schema).cluster.device == "cpu"


def test_an_installed_wheel_finds_its_own_files(tmp_path: Path) -> None:
    """The files of the wheel, as pyproject.toml places them, without the repository around."""
    package = tmp_path / "site" / "nemo_rl"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY_ROOT / "nemo_rl", package, ignore=ignored)
    for source, target in WHEEL["sources"].items():
        assert source in WHEEL["only-include"]
        shutil.copytree(REPOSITORY_ROOT / source, tmp_path / "site" / target, ignore=ignored)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from nemo_rl.config import load_config; "
        "config = load_config('grpo_code_cpu.yaml'); print(config.policy.model_name); "
        "print(config.data.train.data_path); print(config.data.train.prompt_file)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path / "site")], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = done.stdout.split()
    assert found[0] == str(package / "examples/assets/tiny-chat")
    assert all(path.startswith(str(package)) for path in found)
