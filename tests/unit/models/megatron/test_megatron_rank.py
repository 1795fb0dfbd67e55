"""Everything except training on a rank of Megatron Core: scores, layers, reference weights, metrics, schedules."""

import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import backend_cases
import mesh_parity
import pytest
import torch
import torch.distributed as dist
from rank_backend import section_of
from rank_host import Host, needs_megatron
from small_models import hf_model

from nemo_rl.utils.errors import ConfigError

pytestmark = needs_megatron

SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
OVERLAP = {
    "optimizer": {"use_distributed_optimizer": True},
    "distributed_data_parallel_config": {"overlap_grad_reduce": True, "overlap_param_gather": True},
}
VPP = {**PP, "virtual_pipeline_model_parallel_size": 2}
FEW = [[0, 8], [0, 1, 8]]
"""Bounds of no more microbatches than there are stages."""
LIMIT_S = 2.0


def on_two_ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    llama, moe = mesh_parity.model("llama"), mesh_parity.model("moe")
    gemma3, gpt_oss = (hf_model(name, num_hidden_layers=4) for name in ("gemma3_text", "gpt_oss"))
    found = {
        "answers sp": backend_cases.answers(llama, SP, packed=False),
        "answers cp": backend_cases.answers(gemma3, {**CP, **OVERLAP}, packed=True),
        "answers pp": backend_cases.answers(gpt_oss, PP, packed=True),
        "reward sp": backend_cases.reward_error(SP, packed=True),
        "reward cp": backend_cases.reward_error(CP, packed=False),
        "experts sp": backend_cases.load_of_experts(moe, {**SP, **EP}, packed=False),
        "experts cp": backend_cases.load_of_experts(moe, CP, packed=True),
        "skipped": backend_cases.skipped_update(llama, {}),
        "skipped overlap": backend_cases.skipped_update(llama, OVERLAP),
        "auxiliary": backend_cases.auxiliary_norm({}),
        "auxiliary sp": backend_cases.auxiliary_norm(SP),
        "auxiliary cp": backend_cases.auxiliary_norm(CP),
        "auxiliary pp": backend_cases.auxiliary_norm(PP),
        "nothing": backend_cases.nothing_scored(llama),
        "few": [backend_cases.norm_in_parts(VPP, bounds) for bounds in FEW],
    }
    found["deadline"] = waits_for_a_stage(rank, folder)
    return found


def waits_for_a_stage(rank: int, folder: str) -> str:
    """Return the error of a second stage whose first stage never starts."""
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT_S))
    trainer = mesh_parity.Trainer(mesh_parity.model("llama"), PP)
    answer = "absent"
    if rank == 1:
        try:
            trainer.train(mesh_parity.batch(0), False)
        except RuntimeError as error:
            answer = str(error)
    store.set(f"{rank}", "done")
    store.wait(["0", "1"], timedelta(seconds=60))
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/last", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)  # which `run_ranks` ends
    return answer


def on_one_rank(rank: int, world: int) -> dict[str, Any]:
    return {
        "bias kept": backend_cases.biases_after_an_update(0.0),
        "bias moved": backend_cases.biases_after_an_update(1e-3),
        "auxiliary": backend_cases.auxiliary_norm({}),
        "nothing": backend_cases.nothing_scored(mesh_parity.model("llama")),
        "embedding": backend_cases.norm_of_a_large_embedding(),
        "few": [backend_cases.norm_in_parts({}, bounds) for bounds in FEW],
        "rates": {name: rates(**values) for name, values in SCHEDULES.items()},
        "contradiction": contradiction(),
    }


SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {"lr_warmup_iters": 2},
    "linear": {"lr_decay_style": "linear", "lr_decay_iters": 6, "lr_warmup_iters": 2},
    "cosine": {"lr_decay_style": "cosine", "lr_decay_iters": 6},
    "rising decay": {"weight_decay_incr_style": "linear", "lr_decay_iters": 4, "end_weight_decay": 0.5},
}


def rates(**values: Any) -> list[tuple[float, float]]:
    """Return rate and weight decay of a matrix and a vector over eight steps."""
    from nemo_rl.models.megatron.optimizer import build_scheduler, learning_rate

    groups = [{"default_config": True, "wd_mult": 1.0}, {"wd_mult": 0.0}]
    optimizer: Any = SimpleNamespace(param_groups=groups)
    section = section_of(scheduler={"lr_warmup_init": 1e-4, **values}, optimizer={"min_lr": 2e-4})
    scheduler = build_scheduler(optimizer, section)
    found = []
    for _ in range(8):
        assert groups[1]["weight_decay"] == 0.0
        found.append((learning_rate(optimizer), groups[0]["weight_decay"]))
        scheduler.step(increment=1)
    return found


def contradiction() -> list[str]:
    said = []
    for values in (
        {"lr_decay_style": "linear"},
        {"lr_decay_style": "linear", "lr_decay_iters": 3, "lr_warmup_iters": 5},
    ):
        try:
            rates(**values)
        except ConfigError as error:
            said.append(str(error))
    return said


@pytest.fixture(scope="module")
def found(host: Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return {"one": host.run(on_one_rank, 1)[0], "two": host.run(on_two_ranks, 2, str(folder))}


@pytest.mark.parametrize("mesh", ["answers sp", "answers cp", "answers pp"])
def test_scores_layers_and_reference_equal_hugging_face(found: dict[str, Any], mesh: str) -> None:
    ranks = [rank[mesh] for rank in found["two"]]
    assert "top logits" in ranks[1] and "temperature" in ranks[1]
    for answers in ranks:
        assert answers.pop("reference") == {"moved": True, "initial": True, "current": True}
        assert {name: value for name, value in answers.items() if not value < 1e-5} == {}


@pytest.mark.parametrize("mesh", ["reward sp", "reward cp"])
def test_a_scalar_head_scores_and_trains_like_hugging_face(found: dict[str, Any], mesh: str) -> None:
    for rank in found["two"]:
        assert rank[mesh]["scores"] < 1e-5 and rank[mesh]["gradients"] < 1e-5


@pytest.mark.parametrize("mesh", ["experts sp", "experts cp"])
def test_the_load_of_experts_is_counted_over_real_tokens_of_all_ranks(found: dict[str, Any], mesh: str) -> None:
    for rank in found["two"]:
        metrics, expected = rank[mesh]
        assert metrics == pytest.approx(expected) and len(metrics) == 3


@pytest.mark.parametrize("how", ["skipped", "skipped overlap"])
def test_an_infinite_gradient_changes_nothing(found: dict[str, Any], how: str) -> None:
    for rank in found["two"]:
        norm = rank[how].pop("norm")
        assert not math.isfinite(norm)
        assert rank[how] == {"stepped": False, "unchanged": True, "zero": True, "then": True}


@pytest.mark.parametrize("mesh", ["auxiliary", "auxiliary sp", "auxiliary cp", "auxiliary pp"])
def test_an_auxiliary_loss_does_not_depend_on_the_mesh(found: dict[str, Any], mesh: str) -> None:
    assert found["two"][0][mesh] == pytest.approx(found["one"]["auxiliary"], rel=1e-5)


def test_interleaved_stages_accept_fewer_microbatches_than_stages(found: dict[str, Any]) -> None:
    assert found["two"][0]["few"] == pytest.approx(found["one"]["few"], rel=1e-5)


def test_a_rank_with_nothing_to_score_takes_part(found: dict[str, Any]) -> None:
    assert found["two"][0]["nothing"] == pytest.approx(found["one"]["nothing"], rel=1e-5)


def test_the_norm_of_a_large_embedding_is_exact(found: dict[str, Any]) -> None:
    norm, want = found["one"]["embedding"]
    assert norm == pytest.approx(want, rel=1e-5)


def test_a_stage_does_not_wait_forever(found: dict[str, Any]) -> None:
    assert found["two"][0]["deadline"] == "absent"
    assert "imed out" in found["two"][1]["deadline"]


def test_expert_biases_are_updated_only_if_configured(found: dict[str, Any]) -> None:
    assert found["one"]["bias kept"] == 0.0
    assert found["one"]["bias moved"] == pytest.approx(1e-3, rel=1e-3)


def test_learning_rates_and_decays_follow_their_formulas(found: dict[str, Any]) -> None:
    top, low, first = 1e-3, 2e-4, 1e-4
    warm = [first, (first + top) / 2, top]
    formulas: dict[str, Callable[[int], float]] = {
        "constant": lambda step: warm[min(step, 2)],
        "linear": lambda step: warm[step] if step < 3 else low + (top - low) * max(0.0, 1 - (step - 2) / 4),
        "cosine": lambda step: low + (top - low) * (1 + math.cos(math.pi * min(step / 6, 1))) / 2,
        "rising decay": lambda step: top,
    }
    for name, formula in formulas.items():
        rates_found, decays = zip(*found["one"]["rates"][name], strict=True)
        assert list(rates_found) == pytest.approx([formula(step) for step in range(8)]), name
        rising = [0.1 + 0.4 * min(step / 4, 1) for step in range(8)]
        assert list(decays) == pytest.approx(rising if name == "rising decay" else [0.1] * 8), name


def test_a_contradictory_schedule_is_refused(found: dict[str, Any]) -> None:
    missing, contradicting = found["one"]["contradiction"]
    assert "set lr_decay_iters" in missing and "lr_warmup_iters < lr_decay_iters" in contradicting


def test_the_test_process_is_not_patched(found: dict[str, Any]) -> None:
    assert torch.cuda.Stream.__name__ == "Stream" and torch.cuda.current_device.__module__ == "torch.cuda"
