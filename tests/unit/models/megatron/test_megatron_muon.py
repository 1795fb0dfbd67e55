"""Megatron Core's Muon equals Muon in float64 on Hugging Face's model, on any mesh, and continues bit for bit."""

import re
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mesh_parity
import pytest
import torch
from checkpoint_models import Mesh, Run, differing
from mesh_parity import DECAY, LR, Reference, adam_of, of_one_and_two_ranks
from rank_host import Host, limit_waits, needs_megatron
from torch import Tensor

pytestmark = [
    needs_megatron,
    pytest.mark.skipif(find_spec("emerging_optimizers") is None, reason="emerging-optimizers is not installed"),
]

MUON = {
    "optimizer": "muon",
    "muon_momentum": 0.8,
    "muon_nesterov": True,
    "muon_coefficient_type": "simple",
    "muon_scale_mode": "shape_scaling",
    "muon_fp32_matmul_prec": "highest",
}
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one rank": (1, "llama", {}),
    "experts": (1, "moe", {}),
    "dp": (2, "llama", {}),
    "tp": (2, "tied", TP),
    "tp, computed together": (2, "llama", {**TP, "optimizer": {"muon_tp_mode": "distributed"}}),
    "pp": (2, "llama", {"pipeline_model_parallel_size": 2}),
    "ep": (2, "moe", {"expert_model_parallel_size": 2}),
    "etp": (2, "moe", {**TP, "expert_tensor_parallel_size": 2}),
}


def _matrices(named: dict[str, Tensor]) -> list[list[Tensor]]:
    """Return the parts of each matrix. Gate and up projection are one matrix in Megatron Core."""
    found = []
    for name, weight in named.items():
        if name.endswith("gate_proj.weight"):
            found.append([weight, named[name.replace("gate_proj", "up_proj")]])
        elif re.search(r"experts\.(gate_up|down)_proj$", name):
            found += [[expert] for expert in weight.detach()]
        elif re.search(r"(q|k|v|o|down)_proj\.weight$", name):
            found.append([weight])
    return found


@dataclass
class _Muon:
    """Muon as published, for matrices in float64, with AdamW for the rest."""

    named: dict[str, Any]
    adam: torch.optim.AdamW = field(init=False)
    momentum: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.adam = adam_of({name: p for name, p in self.named.items() if not re.search(r"_proj(\.weight)?$", name)})

    @torch.no_grad()
    def step(self) -> None:
        gradients = _matrices({name: p.grad for name, p in self.named.items()})
        for number, (parts, of_parts) in enumerate(zip(_matrices(self.named), gradients, strict=True)):
            gradient = torch.cat(of_parts)
            before = self.momentum.get(number, torch.zeros_like(gradient))
            kept = self.momentum[number] = 0.8 * before + 0.2 * gradient
            update = _orthogonal(0.8 * kept + 0.2 * gradient)
            rows, columns = update.shape
            scaled = update * LR * max(1, rows / columns) ** 0.5
            for part, of_part in zip(parts, scaled.split([len(part) for part in parts]), strict=True):
                part.data.mul_(1 - LR * DECAY).sub_(of_part)
        self.adam.step()


def _orthogonal(x: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    x = x / x.norm()
    for _ in range(5):
        x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
    return x


def on_rank(rank: int, world: int, references: dict[str, Reference]) -> dict[str, dict[str, float]]:
    limit_waits(60.0)
    found = {}
    for name, (ranks, kind, values) in CASES.items():
        if ranks == world:
            with_muon = {**values, "optimizer": MUON | values.get("optimizer", {})}
            found[name] = mesh_parity.run_case(kind, False, with_muon, references[kind])
    return found


@pytest.fixture(scope="module")
def differences(host: Host) -> dict[str, dict[str, float]]:
    references = {kind: mesh_parity.reference(kind, make=_Muon) for kind in mesh_parity.MODELS}
    return of_one_and_two_ranks(host, on_rank, references)


@pytest.mark.parametrize("name", CASES)
def test_each_mesh_updates_as_muon_in_float64(differences: dict[str, dict[str, float]], name: str) -> None:
    assert {what: value for what, value in differences[name].items() if not value < 1e-5} == {}


EP2 = Mesh("qwen3_moe", ep=2, optimizer="muon", options={"use_distributed_optimizer": False})


def _go_on(run: Run) -> list[float]:
    """Return the losses of two more updates, whose rows do not depend on the mesh."""
    losses = []
    for step in (2, 3):
        torch.manual_seed(step)
        losses.append(run.update(step))
    return losses


def _resume(rank: int, num_ranks: int, mesh: Mesh, folder: Path) -> dict[str, Any]:
    run = Run(mesh)
    for step in range(2):
        run.update(step)
    run.save(folder)
    saved = run.state()
    losses = _go_on(run)
    again = Run(mesh, seed=5)
    again.load(folder)
    loaded = differing(saved, again.state())
    resumed = _go_on(again)
    again.save(folder.with_name("again"))
    return {"loaded": loaded, "ended": differing(run.state(), again.state()), "losses": (losses, resumed)}


def _resume_on(rank: int, num_ranks: int, mesh: Mesh, folder: Path) -> list[float]:
    again = Run(mesh, seed=5)
    again.load(folder)
    return _go_on(again)


@pytest.mark.parametrize(
    ("mesh", "others"),
    [
        (EP2, [replace(EP2, ep=1, tp=2, sp=True), replace(EP2, ep=1, pp=2)]),
        (replace(EP2, precision="bfloat16"), []),
    ],
)
def test_a_resumed_run_is_equal_and_other_meshes_go_on(host: Host, tmp_path: Path, mesh: Mesh, others: list) -> None:
    for found in host.run(_resume, 2, mesh, tmp_path / "saved"):
        assert found["loaded"] == found["ended"] == []
        losses, resumed = found["losses"]
        assert losses == resumed
    for other in others:
        for of_rank in host.run(_resume_on, 2, other, tmp_path / "saved"):
            assert of_rank == pytest.approx(losses, rel=5e-3)  # steps in bfloat16
