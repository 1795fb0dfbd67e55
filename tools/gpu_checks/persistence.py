"""Check bit for bit that checkpoints, and states moved to the host and back, do not change."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gpu_checks.bench import Bench, packed, policy_config, random_rows, scores, update, weights_of
from gpu_checks.report import Figures, Finding
from nemo_rl.models.policy.workers.rank import PolicyRank

LENGTHS = [24, 9, 17, 3, 24, 12]
KEYS: dict[str, Any] = {"precision": "bfloat16", **packed(64)}


def checkpoint(bench: Bench) -> Iterator[Finding]:
    """Check that a new rank loads what was saved (weights, optimizer state), also when saved in the background."""
    config, rows = policy_config(bench.folder("qwen2"), **KEYS), random_rows(LENGTHS)
    rank = bench.policy("qwen2", **KEYS)
    for _ in range(2):
        update(rank, config, rows)
    folders = _folders(bench, "checkpoint")
    rank.save_checkpoint(*folders)
    saved = _state(rank)
    wanted = update(rank, config, rows)
    yield _same("training goes on, nothing is aliased", saved, _state(rank), should_differ=True)
    rank = bench.policy("qwen2", **KEYS)
    rank.load_checkpoint(*folders)
    yield _same("a new rank loads it", saved, _state(rank))
    again = update(rank, config, rows)
    problem = "" if abs(again.loss - wanted.loss) <= 1e-3 else "the update after the load is another one"
    yield Finding("the next update", {"loss": again.loss, "loss_before": wanted.loss}, problem)
    saved, folders = _state(rank), _folders(bench, "background")
    rank.save_checkpoint(*folders, background=True)
    update(rank, config, rows)
    rank.finish_checkpoint()
    rank = bench.policy("qwen2", **KEYS)
    rank.load_checkpoint(*folders)
    yield _same("written while training goes on, loaded in a new rank", saved, _state(rank))


def offload(bench: Bench) -> Iterator[Finding]:
    """Check moving the optimizer state to the host and back with a checkpoint in between, and the reference weights."""
    config, rows = policy_config(bench.folder("qwen2"), **KEYS), random_rows(LENGTHS)
    rank = bench.policy("qwen2", **KEYS)
    first = scores(rank, config, rows)
    for _ in range(2):
        update(rank, config, rows)
    before = _state(rank)
    for attempt in range(2):  # the second attempt reuses the first one's buffers
        folders = _folders(bench, f"offloaded_{attempt}")
        rank.move_optimizer_state(to_host=True)
        rank.save_checkpoint(*folders)
        rank.move_optimizer_state(to_host=False)
    yield _same("optimizer state, out and in twice", before, _state(rank))
    reference = scores(rank, config, rows, reference=True)
    error = float((reference - first).abs().max())
    problem = "" if error <= 1e-6 else "the reference is not the model that the run started from"
    yield Finding("reference log-probs", {"error": error}, problem)
    yield _same("weights after the reference", before, _state(rank))
    rank = bench.policy("qwen2", **KEYS)
    rank.load_checkpoint(*folders)
    yield _same("saved while offloaded, loaded in a new rank", before, _state(rank))
    yield _frozen_turns(bench)


def _frozen_turns(bench: Bench) -> Finding:
    """Move the weights of a model without an optimizer to the host and back, twice."""
    keys = {**KEYS, "optimizer": None}
    config, rows = policy_config(bench.folder("qwen2"), **keys), random_rows(LENGTHS)
    rank = bench.policy("qwen2", **keys)
    before, first = weights_of(rank), scores(rank, config, rows)
    for _ in range(2):
        rank.move_weights(to_host=True)
        rank.move_weights(to_host=False)
    finding = _same("a frozen model's weights, out and in twice", before, weights_of(rank))
    again = scores(rank, config, rows)
    return finding if torch.equal(first, again) else replace(finding, problem="it scores differently")


def trained_turns(bench: Bench) -> Iterator[Finding]:
    """Check that updates are the same bits with the weights and the optimizer's state out and in between them.

    The critic of PPO takes such turns with the policy and the engines on its GPU.
    """
    config, rows = policy_config(bench.folder("qwen2"), **KEYS), random_rows(LENGTHS)
    found = []
    for moves in (False, True):
        rank = bench.policy("qwen2", **KEYS)
        for _ in range(3):
            update(rank, config, rows)
            if moves:
                rank.move_optimizer_state(to_host=True)
                rank.move_weights(to_host=True)
                rank.move_weights(to_host=False)
                rank.move_optimizer_state(to_host=False)
        found.append((_state(rank), scores(rank, config, rows)))
    (state, before), (moved, after) = found
    finding = _same("three updates, the model out and in after each", state, moved)
    yield finding if torch.equal(before, after) else replace(finding, problem="it scores differently")
    bench.end_policy()


def _folders(bench: Bench, name: str) -> tuple[str, str]:
    root = Path(bench.setting.folder) / name
    return str(root / "weights"), str(root / "optimizer")


def _state(rank: PolicyRank) -> dict[str, Tensor]:
    """Return CPU copies of every weight and every tensor of the optimizer's state."""
    state = weights_of(rank)
    optimizer = rank.backend.optimizer  # type: ignore[attr-defined]
    for index, entry in enumerate(optimizer.state_dict()["state"].values()):
        state |= {f"optimizer.{index}.{name}": _on_cpu(value) for name, value in entry.items()}
    return state


def _on_cpu(value: Any) -> Tensor:
    tensor = value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
    return tensor.detach().to("cpu", copy=True)


def _same(name: str, want: dict[str, Tensor], got: dict[str, Tensor], *, should_differ: bool = False) -> Finding:
    differ = [key for key in want if key not in got or not torch.equal(want[key], got[key])]
    figures: Figures = {"tensors": len(want), "differ": len(differ)}
    if should_differ:
        return Finding(name, figures, "" if differ else "the copy changed along with the weights")
    return Finding(name, figures, f"not the same bits: {', '.join(differ[:3])}" if differ else "")
