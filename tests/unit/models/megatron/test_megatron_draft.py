"""Training of a draft model with Megatron Core: loss and gradient against plain PyTorch in float64."""

from typing import Any

import draft_cases
import mesh_parity
import pytest
from rank_host import Host, limit_waits, needs_megatron

from nemo_rl.distributed.ranks.placements import whole

pytestmark = needs_megatron

TAPS, SEED = (0, 2, 4), 0
DRAFT = {"draft": {"enabled": True, "aux_layer_indices": TAPS}, "optimizer": {"clip_grad": None}}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CASES: dict[str, tuple[int, str, bool, dict[str, Any]]] = {
    "one rank": (1, "llama", False, {}),
    "one rank, packed and recomputed": (1, "llama", True, {"activation_checkpointing": True}),
    "two data-parallel ranks": (2, "llama", True, {}),
    "tp": (2, "llama", False, {"tensor_model_parallel_size": 2}),
    "tp and sp, packed": (2, "deepseek_v3", True, SP),
}


def on_rank(rank: int, world: int, references: dict[str, Any]) -> dict[str, dict[str, float]]:
    limit_waits(60.0)
    return {
        name: differences(kind, packed, values, references[kind])
        for name, (ranks, kind, packed, values) in CASES.items()
        if ranks == world
    }


def differences(kind: str, packed: bool, values: dict[str, Any], want: dict[str, Any]) -> dict[str, float]:
    trainer = mesh_parity.Trainer(mesh_parity.model(kind), values | DRAFT)
    trainer.train(mesh_parity.batch(0), packed)
    metrics = trainer.backend.update_metrics()
    head = trainer.backend._draft.head
    found = {name: whole(p.grad).double() / 0.1 for name, p in head.named_parameters() if p.grad is not None}
    largest = max(
        ((found[name] - gradient).abs().max() / gradient.abs().max()).item()
        for name, gradient in want["gradients"].items()
    )
    return {
        "loss": abs(metrics["draft_loss"] / want["loss"] - 1),
        "agreement": abs(metrics["draft_agreement"] - want["agreement"]),
        "gradients": largest,
        "missing": float(found.keys() != want["gradients"].keys()),
    }


@pytest.fixture(scope="module")
def found(host: Host) -> dict[str, dict[str, float]]:
    kinds = {kind for _, kind, _, _ in CASES.values()}
    data = mesh_parity.batch(0)
    references = {kind: draft_cases.reference(mesh_parity.model(kind), data, TAPS, SEED) for kind in kinds}
    return mesh_parity.of_one_and_two_ranks(host, on_rank, references)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_plain_pytorch(case: str, found) -> None:
    got = found[case]
    assert got["loss"] < 1e-5 and got["agreement"] < 1e-9 and got["gradients"] < 1e-4 and not got["missing"], got
