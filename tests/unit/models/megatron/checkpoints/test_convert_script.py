"""`convert_megatron_to_hf.py` accepts NeMo RL's arguments; the backend that wrote the checkpoint does the work."""

import importlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nemo_rl.models.training.backends

pytestmark = pytest.mark.fast

CONVERTERS = Path(__file__).resolve().parents[5] / "examples/converters"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Record the arguments of the calls of `TrainingBackend.export`."""
    calls: list[Any] = []
    backend = SimpleNamespace(
        find_weights=lambda path: path / "policy/weights", export=lambda *args: calls.append(args)
    )
    monkeypatch.setattr(nemo_rl.models.training.backends, "backend_of_checkpoint", lambda *paths: backend)
    monkeypatch.syspath_prepend(str(CONVERTERS))
    (tmp_path / "config.yaml").write_text("policy: {model_name: trained}\n")
    return calls


def _run(*arguments: object) -> int:
    return importlib.import_module("convert_megatron_to_hf").main([str(one) for one in arguments])


def test_the_checkpoint_is_exported_with_its_own_tokenizer(exported, tmp_path) -> None:
    given = ["--config", tmp_path / "config.yaml", "--megatron-ckpt-path", tmp_path, "--hf-ckpt-path", tmp_path / "hf"]
    assert _run(*given) == 0
    assert exported == [(tmp_path / "policy/weights", tmp_path / "hf", "trained", None)]


def test_a_named_model_gives_the_tokenizer_and_no_strict_gives_a_notice(exported, tmp_path, caplog) -> None:
    given = ["--megatron-ckpt-path", tmp_path, "--hf-ckpt-path", tmp_path / "hf", "--hf-model-name", "named"]
    with caplog.at_level(logging.WARNING):
        assert _run(*given, "--no-strict", "--dtype", "bfloat16") == 0
    assert exported == [(tmp_path / "policy/weights", tmp_path / "hf", "named", "bfloat16")]
    assert "--no-strict has no effect" in caplog.text
