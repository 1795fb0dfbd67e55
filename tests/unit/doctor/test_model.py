"""`nemo_rl doctor --model`: what it finds about a model is what a run finds, and planted faults are found."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from parity.every_type import tiny_model

from nemo_rl.__main__ import main
from nemo_rl.commands.doctor import small_copy
from nemo_rl.commands.doctor.model import Question
from nemo_rl.commands.doctor.model_cells import Cell, Trial, TrialResult, train_cell
from nemo_rl.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def folder_of(model_type: str, folder: Path) -> str:
    """Write the configuration alone: the command reads no weights."""
    tiny_model(model_type).config.save_pretrained(folder)
    return str(folder)


def cells_of(model_type: str, folder: Path) -> dict[str, Cell]:
    question = Question.of(folder_of(model_type, folder), [])
    return {f"{cell.part}, {cell.what}": cell for cell in question.cells(engines=())}


def test_a_dense_model_is_right_wherever_it_has_the_layers(tmp_path) -> None:
    cells = cells_of("llama", tmp_path)
    refused = {name for name, cell in cells.items() if cell.result is TrialResult.REFUSED}
    assert refused == {"training, EP 2, padded", "training, EP 2, packed"}
    assert "llama has no experts" in cells["training, EP 2, packed"].told
    right = [cell for cell in cells.values() if cell.result is TrialResult.RIGHT]
    assert len(right) == len(cells) - 2
    assert all(cell.difference is not None and cell.difference < 1e-5 for cell in right)


def test_a_model_that_mixes_packed_rows_is_refused_where_a_run_is(tmp_path) -> None:
    question = Question.of(folder_of("minimax", tmp_path), [])
    packed, padded = (train_cell(question.policy, question.model, Trial("", each)) for each in (True, False))
    assert (packed.result, padded.result) == (TrialResult.REFUSED, TrialResult.RIGHT)
    assert "mixes packed sequences outside attention" in packed.told


def test_a_leak_between_packed_sequences_is_found(tmp_path, monkeypatch) -> None:
    question = Question.of(folder_of("qwen3_next", tmp_path), [])
    trial = Trial("", packed=True)
    assert train_cell(question.policy, question.model, trial).result is TrialResult.RIGHT
    for place in ("attention", "build"):
        monkeypatch.setattr(f"nemo_rl.models.dtensor.{place}.respect_borders", lambda hf: False)
    assert train_cell(question.policy, question.model, trial).result is TrialResult.REFUSED
    monkeypatch.setattr("nemo_rl.models.dtensor.attention.verify_packing", lambda *_: None)
    leaking = train_cell(question.policy, question.model, trial)  # found by the numbers alone
    assert leaking.result is TrialResult.REFUSED
    assert "the loss differs by" in leaking.told


def test_a_wrong_conversion_to_megatron_is_found(tmp_path, monkeypatch) -> None:
    question = Question.of(folder_of("llama", tmp_path), [])
    converted = small_copy._converted

    def halved(backend, folder):
        with torch.no_grad():
            next(backend.chunks[0].parameters()).mul_(0.5)
        return converted(backend, folder)

    monkeypatch.setattr(small_copy, "_converted", halved)
    with small_copy.saved_small_copy(question.policy, question.model) as small:
        first = next(small.megatron_cells())
    assert first.result is TrialResult.FAILED
    assert "the exported model.embed_tokens.weight differs" in first.told


def test_missing_gradients_of_routers_are_found(tmp_path, monkeypatch) -> None:
    question = Question.of(folder_of("deepseek_v3", tmp_path), [])
    with small_copy.saved_small_copy(question.policy, question.model) as small:
        right = next(small.megatron_cells())
        monkeypatch.setitem(small_copy._UNCLIPPED, "freeze_moe_router", True)
        wrong = next(small.megatron_cells())
    assert (right.result, wrong.result) == (TrialResult.RIGHT, TrialResult.FAILED)
    assert "the gradient's norm differs by" in wrong.told


def test_the_command_prints_json_and_fails_with_a_failed_trial(tmp_path, monkeypatch, capsys) -> None:
    cells = [
        Cell("training", "one rank, packed", TrialResult.RIGHT, "float64", 1e-12, 0.5),
        Cell("hf", "", TrialResult.REFUSED),
    ]
    monkeypatch.setattr(Question, "cells", lambda self: iter(cells))
    given = ["doctor", "--model", folder_of("llama", tmp_path)]
    assert main([*given, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model_type"], report["counts"]["right"]) == ("llama", 1)
    assert report["cells"][0]["difference"] == 1e-12
    cells.append(Cell("vllm", "float32", TrialResult.FAILED, "it crashed"))
    assert main(given) == 1
    assert "it crashed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["grpo.max_num_steps=1"], "takes keys of policy only"),
        (["policy.precisions=float32"], "precisions"),
    ],
)
def test_wrong_overrides_are_refused(given, message, tmp_path) -> None:
    with pytest.raises(ConfigError, match=message):
        Question.of(folder_of("llama", tmp_path), given)


def test_a_model_that_is_not_here_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(ConfigError, match="neither a model folder"):
        Question.of(str(tmp_path / "nothing"), [])


def test_engines_are_compared_after_weight_updates(tmp_path, monkeypatch) -> None:
    question = Question.of(folder_of("llama", tmp_path), [])
    with small_copy.saved_small_copy(question.policy, question.model) as small:
        (right,) = small.engine_cells("hf", ["float32"])
        assert right.result is TrialResult.RIGHT, right
        assert right.difference is not None and 0 < right.difference < 1e-4
        monkeypatch.setattr(small_copy, "_ROUNDING", 0.2)
        (wrong,) = small.engine_cells("hf", ["bfloat16"])
    assert wrong.result is TrialResult.FAILED
    found = re.fullmatch(r"log-probabilities differ by (\S+) on average, and .* by (\S+), from float32", wrong.told)
    assert found is not None, wrong
    assert 0.5 < float(found[1]) / float(found[2]) < 2, "an engine that is right rounds as transformers does"
