"""Router replay in Megatron Core: given experts against plain PyTorch in float64, and -1 against no replay.

The experts of each token are random, so no router would choose them.
"""

from typing import Any

import mesh_parity
import pytest
import torch
import torch.distributed as dist
from given_experts import logprobs_given, random_experts
from rank_backend import backend_of
from rank_host import Host, limit_waits, needs_megatron
from torch import Tensor
from witness import global_tensors, largest_gradient_difference

from nemo_rl.data.routed_experts import ROUTED_EXPERTS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.errors import ConfigError

pytestmark = needs_megatron

REPLAY = {"router_replay": {"enabled": True}}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
RECOMPUTED = {"activation_checkpointing": True, "recompute_granularity": "full"}
CASES: dict[str, tuple[int, str, bool, dict[str, Any]]] = {
    "one rank, recomputed": (1, "moe", False, RECOMPUTED),
    "one rank, packed": (1, "deepseek_v3", True, {}),
    "tp, sp and ep": (2, "deepseek_v3", False, {**SP, "expert_model_parallel_size": 2}),
    "cp, packed": (2, "moe", True, {"context_parallel_size": 2}),
    "pp, packed": (2, "deepseek_v3", True, {"pipeline_model_parallel_size": 2}),
}


def batch(kind: str) -> BatchedDataDict[Any]:
    data = mesh_parity.batch(0)
    data[ROUTED_EXPERTS] = random_experts(mesh_parity.model(kind), *data["input_ids"].shape)
    return data


def reference(kind: str) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Return log-probabilities `[b, T - 1]`, loss and gradients of plain PyTorch in float64."""
    model, data = mesh_parity.model(kind).double(), batch(kind)
    logprobs = logprobs_given(model, data)[:, 1:]
    loss = mesh_parity.loss_of(logprobs, torch.zeros(()), data, mesh_parity.count_of(data))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logprobs.detach(), loss.item(), gradients


def without_entropy(logprobs: Tensor, entropy: Tensor, rows: BatchedDataDict[Any], count: float) -> Tensor:
    return _loss_of(logprobs, 0.0 * entropy, rows, count)


_loss_of = mesh_parity.loss_of


def on_rank(rank: int, world: int, references: dict[str, Any]) -> dict[str, dict[str, float]]:
    limit_waits(60.0)
    mesh_parity.loss_of = without_entropy  # this process is a fork
    return {
        name: _differences(kind, packed, values | REPLAY, references[kind])
        for name, (ranks, kind, packed, values) in CASES.items()
        if ranks == world
    }


def _differences(kind: str, packed: bool, values: dict[str, Any], expected: Any) -> dict[str, float]:
    logprobs, loss, gradients = expected
    trainer = mesh_parity.Trainer(mesh_parity.model(kind), values)
    found, scored = trainer.train(batch(kind), packed)
    of_ranks = global_tensors(mesh_parity.model(kind).config, dict(gradients))
    largest, _ = largest_gradient_difference(trainer.backend.chunks, of_ranks)
    metrics = trainer.backend.update_metrics()
    return {
        "loss": abs(found / loss - 1),
        "logprobs": trainer.logprob_error(batch(kind), scored, logprobs),
        "gradients": largest,
        "fallback": metrics["moe/fallback_token_share"],
    }


@pytest.fixture(scope="module")
def differences(host: Host) -> dict[str, dict[str, float]]:
    references = {kind: reference(kind) for kind in ("moe", "deepseek_v3")}
    found: dict[str, dict[str, float]] = {}
    for world in (1, 2):
        ranks = host.run(on_rank, world, references)
        found |= {name: mesh_parity.worst([rank[name] for rank in ranks]) for name in ranks[0]}
    return found


@pytest.mark.parametrize("name", CASES)
def test_each_mesh_replays_the_experts_of_its_tokens(differences: dict[str, dict[str, float]], name: str) -> None:
    assert {what: value for what, value in differences[name].items() if not value < 1e-5} == {}


def fallen_back(rank: int, world: int, kind: str) -> dict[str, Any]:
    """Train with all experts -1, and without replay; return whether both agree in each bit."""
    data, values = batch(kind), mesh_parity.batch(0)
    data[ROUTED_EXPERTS].fill_(-1)
    results = []
    for given, rows in ((REPLAY, data), ({}, values)):
        trainer = mesh_parity.Trainer(mesh_parity.model(kind), dict(given))
        loss, scored = trainer.train(rows, packed=True)
        metrics = trainer.backend.update_metrics()
        norm, _ = trainer.backend.clip_and_step()
        results.append((loss, torch.cat(scored), norm, metrics))
    (loss, scored, norm, metrics), (plain_loss, plain_scored, plain_norm, plain_metrics) = results
    shares = [metrics.pop(f"moe/{name}_token_share") for name in ("replayed", "fallback")]
    same = (loss, norm, metrics) == (plain_loss, plain_norm, plain_metrics)
    return {"same": same and torch.equal(scored, plain_scored), "shares": shares}


@pytest.mark.parametrize("kind", ["moe", "deepseek_v3"])
def test_without_reported_experts_nothing_changes(host: Host, kind: str) -> None:
    (found,) = host.run(fallen_back, 1, kind)
    assert found == {"same": True, "shares": [0.0, 1.0]}


def refused(rank: int, world: int) -> str:
    try:
        backend_of(mesh_parity.model("llama"), **REPLAY)
    except ConfigError as error:
        return str(error)
    dist.barrier()
    return ""


def test_a_model_without_experts_is_refused(host: Host) -> None:
    (message,) = host.run(refused, 1)
    assert "the model has no experts" in message
