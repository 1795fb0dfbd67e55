"""`nemo_rl doctor --model`: what it finds about a model is what a run finds, and planted faults are found."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from parity.every_type import tiny_model

from nemo_rl.__main__ import main
from nemo_rl.commands.doctor import megatron_cells, small_copy
from nemo_rl.commands.doctor.megatron_cells import MEGATRON_MESHES, PART, SmallModel, cells_of_mesh
from nemo_rl.commands.doctor.model import Question
from nemo_rl.commands.doctor.model_cells import PACKED, PADDED, Cell, Trial, TrialResult, train_cell
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
    assert refused == {f"{part}, EP 2, {rows}" for part in ("training", PART) for rows in (PADDED, PACKED)}
    assert "llama has no experts" in cells["training, EP 2, packed"].told
    right = [cell for cell in cells.values() if cell.result is TrialResult.RIGHT]
    assert len(right) == len(cells) - 4
    assert all(cell.difference is not None and cell.difference < 1e-3 for cell in right)
    assert sum(cell.part == PART for cell in right) == 2 * len(MEGATRON_MESHES) - 2


def test_a_model_that_mixes_packed_rows_is_refused_where_a_run_is(tmp_path) -> None:
    question = Question.of(folder_of("minimax", tmp_path), [])
    packed, padded = (train_cell(question.policy, question.model, Trial("", each)) for each in (True, False))
    assert (packed.result, padded.result) == (TrialResult.REFUSED, TrialResult.RIGHT)
    assert "mixes packed sequences outside attention" in packed.told


def test_a_refusal_says_what_to_set(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("nemo_rl.models.dtensor.tensor_parallel._INPUTS_PER_LAYER", "no such method")
    question = Question.of(folder_of("gemma4_text", tmp_path), [])
    mesh = {"tensor_parallel_size": 2, "sequence_parallel": True}
    refused = train_cell(question.policy, question.model, Trial("", False, mesh, ranks=2))
    assert refused.result is TrialResult.REFUSED
    assert refused.told.startswith("tensor_parallel_size=2 x sequence_parallel=true is not right for gemma4_text")
    assert refused.told.endswith("Set sequence_parallel=false or tensor_parallel_size=1."), refused.told


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


def small_models(folder: Path, *types: str) -> list[SmallModel]:
    made = []
    for model_type in types:
        hf = tiny_model(model_type)
        hf.save_pretrained(folder / model_type)
        question = Question.of(str(folder / model_type), [])
        made.append(SmallModel(model_type, question.policy, hf, str(folder / model_type)))
    return made


def on_mesh(mesh: str, models: list[SmallModel]) -> dict[tuple[str, str], Cell]:
    return {(model.name, cell.what): cell for model, cell in cells_of_mesh(mesh, models)}


def test_a_wrong_conversion_to_megatron_is_found(tmp_path, monkeypatch) -> None:
    converted = megatron_cells._converted

    def halved(backend, expected):
        with torch.no_grad():
            next(backend.chunks[0].parameters()).mul_(0.5)
        return converted(backend, expected)

    monkeypatch.setattr(megatron_cells, "_converted", halved)
    cells = on_mesh("one rank", small_models(tmp_path, "llama"))
    assert {cell.result for cell in cells.values()} == {TrialResult.FAILED}
    assert "the exported model.embed_tokens.weight differs" in cells["llama", "one rank, padded"].told


def test_missing_gradients_of_routers_are_found(tmp_path, monkeypatch) -> None:
    models = small_models(tmp_path, "deepseek_v3")
    assert {cell.result for cell in on_mesh("TP 2 with SP", models).values()} == {TrialResult.RIGHT}
    monkeypatch.setitem(megatron_cells.SETTINGS, "freeze_moe_router", True)
    wrong = on_mesh("one rank", models)["deepseek_v3", "one rank, packed"]
    assert wrong.result is TrialResult.FAILED
    assert re.search(r"the step of model\.layers\.\d\.mlp\.gate\.weight differs by 1\.0e\+00", wrong.told), wrong


def test_a_rank_that_dies_fails_its_model_and_not_the_next(tmp_path, monkeypatch) -> None:
    trained = megatron_cells._trained

    def dies(backend, job, rank):
        if job.task.probe_model.config.model_type == "qwen2" and rank == 1:
            os.abort()
        return trained(backend, job, rank)

    monkeypatch.setattr(megatron_cells, "_trained", dies)
    cells = on_mesh("PP 2", small_models(tmp_path, "qwen2", "llama"))
    results = {name: cell.result for (name, _), cell in cells.items()}
    assert results == {"qwen2": TrialResult.FAILED, "llama": TrialResult.RIGHT}
    assert "SIGABRT" in cells["qwen2", "PP 2, padded"].told


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


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ('{"model_type": "superlm9"}', r"has the model_type 'superlm9', which transformers .* does not know"),
        (
            '{"model_type": "superlm9", "auto_map": {"AutoConfig": "configuration_superlm9.Own"}}',
            r"classes are in its own files .* trust_remote_code=true in a model's section runs this code",
        ),
        ('{"model_type": "vit"}', "of the type vit, for which transformers .* has no language model"),
        ('{"model_type": "llama",', "has a config.json that cannot be read"),
    ],
)
def test_a_configuration_that_is_no_language_model_is_refused_with_the_cause(written, message, tmp_path) -> None:
    (tmp_path / "config.json").write_text(written, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        Question.of(str(tmp_path), [])


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
