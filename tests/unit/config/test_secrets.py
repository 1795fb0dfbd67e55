"""Secrets of a configuration: what files and trackers show instead of them, and how a file with them is read back."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl.config import GRPOMasterConfig, load_config, public_text, public_values, save_resolved
from nemo_rl.config.rules.resume import changed_keys
from nemo_rl.utils.errors import ConfigError

BASE = Path(__file__).resolve().parents[3] / "examples/configs/grpo_math_cpu.yaml"
SECRET = "s3cr3t-of-the-user"

FILE = """\
defaults: {base}
policy:
  generation:
    engine: {{env_vars: {{MY_SETTING: 'plain', SOME_API_KEY: written-out-42}}}}
    vllm_kwargs: {{nested: [{{deep: '${{env.judge_of_mine.url}}'}}]}}
env:
  judge_of_mine:
    url: https://user:${{oc.env:NEMO_TEST_SECRET}}@host/v1
    password: p4ssword-1
    tracker: https://me:l0gin-9@host/x
    pad_token: '<pad>'
    copy: ${{.password}}
    number: ${{oc.decode:${{oc.env:NEMO_TEST_NUMBER}}}}
  copied: ${{env.judge_of_mine}}
  math: {{}}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEMO_TEST_SECRET", SECRET)
    monkeypatch.setenv("NEMO_TEST_NUMBER", "7")
    path = tmp_path / "run.yaml"
    path.write_text(FILE.format(base=BASE))
    return path


def loaded(path: Path, *overrides: str) -> GRPOMasterConfig:
    return load_config(path, overrides, check=False)


def section(values: Any) -> dict[str, Any]:
    return dict(values["env"]["judge_of_mine"])


def test_the_run_has_the_secrets_and_its_files_do_not(file: Path, tmp_path: Path) -> None:
    config = loaded(file)
    assert SECRET in section(config)["url"] and section(config)["copy"] == "p4ssword-1"
    shown = public_values(config)
    assert section(shown)["url"] == "https://user:${oc.env:NEMO_TEST_SECRET}@host/v1"
    assert (section(shown)["password"], section(shown)["pad_token"], section(shown)["number"]) == ("***", "<pad>", 7)
    assert section(shown)["tracker"] == "https://***@host/x"
    generation = shown["policy"]["generation"]
    assert generation["engine"]["env_vars"] == {"MY_SETTING": "plain", "SOME_API_KEY": "***"}
    assert generation["vllm_kwargs"]["nested"][0]["deep"] == "${env.judge_of_mine.url}"
    assert shown["env"]["copied"]["url"] == section(shown)["url"]
    save_resolved(config, tmp_path / "config.yaml")
    for text in (json.dumps(shown), (tmp_path / "config.yaml").read_text(), str(public_values(config, "python"))):
        assert not any(secret in text for secret in (SECRET, "p4ssword-1", "written-out-42", "l0gin-9"))


def test_a_secret_of_the_environment_is_read_again_and_others_have_to_be_given(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_resolved(loaded(file), tmp_path / "config.yaml")
    with pytest.raises(
        ConfigError, match=r"env.judge_of_mine.password is hidden in .*config.yaml. Give it again"
    ) as told:
        loaded(tmp_path / "config.yaml")
    assert "SOME_API_KEY is hidden" in str(told.value) and "url" not in str(told.value)
    given = [
        *("env.judge_of_mine.password=p4ssword-1", "env.copied.password=p4ssword-1"),
        *(f"env.{name}.tracker=https://me:l0gin-9@host/x" for name in ("judge_of_mine", "copied")),
        "policy.generation.engine.env_vars.SOME_API_KEY=written-out-42",
    ]
    assert loaded(tmp_path / "config.yaml", *given).model_dump() == loaded(file).model_dump()
    monkeypatch.setenv("NEMO_TEST_SECRET", "another")
    assert "another" in section(loaded(tmp_path / "config.yaml", *given))["url"]


def test_hidden_values_are_no_change_of_a_resumed_run(file: Path) -> None:
    stored = yaml.safe_load(yaml.safe_dump(public_values(loaded(file))))
    assert changed_keys(loaded(file), stored) == []
    changed = changed_keys(loaded(file, "env.judge_of_mine.pad_token=x"), stored)
    assert [change.key for change in changed] == ["env.copied.pad_token", "env.judge_of_mine.pad_token"]


def test_the_recorded_command_has_no_secret(file: Path) -> None:
    override = "env.judge_of_mine.password=hunter"
    config = loaded(file, override)
    assert public_text(f"run_grpo.py {override} grpo.seed=7", config) == (
        "run_grpo.py env.judge_of_mine.password=*** grpo.seed=7"
    )


def test_keys_that_further_keys_are_moved_into_are_hidden_too(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"defaults: {BASE}\nenv: {{nemo_gym: {{config_paths: [a.yaml], policy: {{api_key: abc-123}}}}}}")
    config = loaded(path)
    assert config.env["nemo_gym"].servers["policy"]["api_key"] == "abc-123"
    assert public_values(config)["env"]["nemo_gym"]["servers"]["policy"]["api_key"] == "***"


def test_a_model_from_the_environment_is_read_again_with_all_that_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_TEST_MODEL", "organization/model")
    config = load_config(BASE, ["policy.model_name='${oc.env:NEMO_TEST_MODEL}'"], check=False)
    assert config.policy.tokenizer.name == "organization/model"
    save_resolved(config, tmp_path / "config.yaml")
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())["policy"]
    assert written["model_name"] == "${oc.env:NEMO_TEST_MODEL}" and "organization" not in str(written)
    assert loaded(tmp_path / "config.yaml") == config
    monkeypatch.delenv("NEMO_TEST_MODEL")
    with pytest.raises(ConfigError, match=r"policy\.model_name .* cannot be worked out: .*NEMO_TEST_MODEL"):
        loaded(tmp_path / "config.yaml")
