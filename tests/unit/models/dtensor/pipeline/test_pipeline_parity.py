"""Pipelines of gloo ranks against plain Hugging Face in one process, in float32: loss, every gradient, log-probs."""

from typing import Any

import pytest
import torch
from pipeline_helpers import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    TOLERANCE,
    Case,
    difference,
    reference,
    run_case,
    run_cases,
    save_model,
)
from policy_helpers import run_ranks

ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "gemma2",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "mistral",
    "phi3",
    "phi",
)


def _compare(name: str, case: Case, tied: bool = False) -> list[dict[str, Any]]:
    ranks = run_ranks(run_case, case.pp * case.dp, name, case)
    _require_equal(name, case, ranks, tied)
    return ranks


def _require_equal(name: str, case: Case, ranks: list[dict[str, Any]], tied: bool = False) -> None:
    want = reference(name, case.dp, case.num_microbatches)
    assert abs(sum(rank["loss"] for rank in ranks) - want["loss"]) < TOLERANCE * abs(want["loss"])
    for kind in ("scores", "evaluated"):
        scores = {key: value for rank in ranks for key, value in rank[kind].items()}
        assert scores.keys() == want["scores"].keys()
        assert max(difference(scores[key], value) for key, value in want["scores"].items()) < TOLERANCE
        assert not any(rank[kind] for rank in ranks[: -case.dp]), "only the last stage has scores"
    grads = {key: grad for rank in ranks[:: case.dp] for key, grad in rank["grads"].items()}
    if tied:
        grads["model.embed_tokens.weight"] += grads.pop("lm_head.weight")
    assert grads.keys() == want["grads"].keys()
    worst = {key: difference(grads[key], grad) for key, grad in want["grads"].items()}
    assert max(worst.values()) < TOLERANCE, max(worst.items(), key=lambda item: item[1])
    assert want["norm"] > MAX_GRAD_NORM, "clipping must be active"
    assert {rank["norm"] for rank in ranks} == {(ranks[0]["norm"][0], True)}, "all ranks measure the same"
    assert ranks[0]["norm"][0] == pytest.approx(want["norm"], rel=TOLERANCE)
    assert ranks[0]["weights"].keys() == want["stepped"].keys()
    for key, weight in want["stepped"].items():
        torch.testing.assert_close(ranks[0]["weights"][key], weight, rtol=0, atol=LEARNING_RATE * 1e-5)
    for rank in ranks[1:]:
        assert list(rank["weights"]) == list(ranks[0]["weights"]), "any rank may send"
        assert all(torch.equal(tensor, ranks[0]["weights"][key]) for key, tensor in rank["weights"].items())


@pytest.mark.parametrize("half", [0, 1], ids=["first half", "second half"])
def test_two_stages_with_uneven_layers_equal_one_process(half, tmp_path) -> None:
    chosen = ARCHITECTURES[half::2]
    names = [save_model(tmp_path / model_type, model_type, num_layers=3) for model_type in chosen]
    of_ranks = run_ranks(run_cases, 2, names, Case())
    for model_type, name, ranks in zip(chosen, names, zip(*of_ranks, strict=True), strict=True):
        _require_equal(name, Case(), ranks)
        held = [{key.split(".")[2] for key in rank["held"] if ".layers." in key} for rank in ranks]
        assert held == [{"0", "1"}, {"2"}], f"{model_type}: a stage keeps its own layers, under their names"


@pytest.mark.parametrize(
    "case",
    [
        Case(virtual=2),
        Case(virtual=2, num_microbatches=5, packed=True),
        Case(pp=4),
        Case(num_microbatches=1),
        Case(dp=2, packed=True, num_microbatches=4),
    ],
    ids=str,
)
def test_schedules_and_meshes_equal_one_process(case, tmp_path) -> None:
    """With tied embeddings: the first and the last stage hold a copy each."""
    name = save_model(tmp_path / "m", "qwen2", num_layers=5, tie_word_embeddings=True)
    ranks = _compare(name, case, tied=True)
    assert "lm_head.weight" not in ranks[0]["weights"], "a tied weight leaves once"
    first, last = ranks[0]["held"], ranks[-1]["held"]
    assert torch.equal(first["model.embed_tokens.weight"], last["lm_head.weight"]), "both copies took the same step"


def test_checkpointed_and_offloaded_stages_equal_one_process(tmp_path) -> None:
    """Activation checkpointing, and parameters in host memory (FSDP2 with one rank per stage)."""
    name = save_model(tmp_path / "m", "qwen3", num_layers=4)
    for section in ({"activation_checkpointing": True}, {"cpu_offload": True, "activation_checkpointing": True}):
        _compare(name, Case(virtual=2, values=(("dtensor_cfg", section),)))


@pytest.mark.parametrize("dp", [1, 2])
def test_bfloat16_equals_the_same_model_in_one_stage(dp, tmp_path) -> None:
    """Hidden states travel in the dtype of the layers, which loses nothing."""
    name = save_model(tmp_path / "m", "qwen3", num_layers=4)
    values = (("precision", "bfloat16"),)
    whole = run_ranks(run_case, dp, name, Case(pp=1, dp=dp, values=values))
    staged = run_ranks(run_case, 2 * dp, name, Case(pp=2, dp=dp, virtual=2, values=values))
    scores = {key: value for rank in staged for key, value in rank["scores"].items()}
    assert all(torch.equal(scores[key], value) for rank in whole for key, value in rank["scores"].items())
    grads = {key: grad for rank in staged for key, grad in rank["grads"].items()}
    assert max(difference(grads[key], grad) for key, grad in whole[0]["grads"].items()) < 1e-6
