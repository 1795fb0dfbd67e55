"""Megatron Core's ranks against Hugging Face: log-probs, gradients, norms and the weights after four updates.

The reference is a Hugging Face model in float64 with torch's AdamW and clipping. Microbatches differ in length and in
number of rows, and one row counts for nothing.
"""

from typing import Any

import mesh_parity
import pytest
from rank_host import Host, limit_waits, needs_megatron

pytestmark = needs_megatron

TP = {"tensor_model_parallel_size": 2}
SP = {**TP, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
VPP = {**PP, "virtual_pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
ZERO = {"optimizer": {"use_distributed_optimizer": True}}
OVERLAP = {**ZERO, "distributed_data_parallel_config": {"overlap_grad_reduce": True, "overlap_param_gather": True}}

CASES: dict[str, tuple[int, str, bool, dict[str, Any]]] = {
    "one rank": (1, "llama", False, {}),
    "one rank, packed": (1, "moe", True, {}),
    "tp": (2, "llama", False, TP),
    "tp and sp": (2, "tied", False, SP),
    "tp and sp, packed": (2, "moe", True, SP),
    "pp, tied": (2, "tied", False, PP),
    "pp, packed": (2, "llama", True, PP),
    "interleaved": (2, "llama", False, VPP),
    "interleaved, packed": (2, "tied", True, VPP),
    "cp": (2, "llama", False, CP),
    "cp, packed": (2, "moe", True, CP),
    "ep": (2, "moe", False, EP),
    "dp": (2, "llama", True, {}),
    "dp, divided optimizer": (2, "moe", False, ZERO),
    "dp, overlapped": (2, "tied", True, OVERLAP),
    "tp, sp and ep": (4, "moe", False, {**SP, **EP}),
    "pp and ep, packed": (4, "moe", True, {**PP, **EP}),
    "cp, tp and sp, packed": (4, "llama", True, {**CP, **SP}),
    "interleaved and cp, overlapped": (4, "tied", False, {**VPP, **CP, **OVERLAP}),
}


def on_rank(rank: int, world: int, references: dict[str, mesh_parity.Reference]) -> dict[str, dict[str, float]]:
    limit_waits(60.0)
    return {
        name: mesh_parity.run_case(kind, packed, values, references[kind])
        for name, (ranks, kind, packed, values) in CASES.items()
        if ranks == world
    }


@pytest.fixture(scope="module")
def references() -> dict[str, mesh_parity.Reference]:
    return {kind: mesh_parity.reference(kind) for kind in mesh_parity.MODELS}


@pytest.fixture(scope="module")
def differences(host: Host, references: dict[str, mesh_parity.Reference]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for world in (1, 2, 4):
        ranks = host.run(on_rank, world, references)
        found |= {name: mesh_parity.worst([rank[name] for rank in ranks]) for name in ranks[0]}
    return found


@pytest.mark.parametrize("name", CASES)
def test_each_mesh_trains_like_hugging_face(differences: dict[str, dict[str, float]], name: str) -> None:
    found = differences[name]
    assert found.keys() >= {"loss", "norm", "logprobs", "weights"}
    assert ("gradients" in found) == ("optimizer" not in CASES[name][3])
    assert {what: value for what, value in found.items() if not value < 1e-5} == {}
