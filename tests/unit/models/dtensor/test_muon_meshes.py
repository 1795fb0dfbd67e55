"""Muon updates a model as torch does on one rank, has equal numbers on all meshes, and continues bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import random_model
from policy_helpers import WeightedNLL, policy_config, process_group, random_batch, run_ranks
from torch import Tensor, nn
from trained_states import assert_equal_states

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.ranks.placements import whole
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker

CPU = torch.device("cpu")
ROWS = 8
MATRICES = ("_proj", "experts.gate_up_proj", "experts.down_proj")
LINEAR = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.5, "total_iters": 4}}
TOLERANCE = 5e-5
"""Largest difference of a weight's change. With Newton-Schulz steps in bfloat16, it is about 2e-2."""


def _save(folder: Path, architecture: str) -> str:
    random_model(architecture, initializer_range=0.1, vocab_size=100).save_pretrained(folder)
    return str(folder)


def _config(name: str, mesh: dict[str, Any], **kwargs: Any) -> PolicyConfig:
    adamw = {"lr": 1e-2, "weight_decay": 0.01}
    muon = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "ns_dtype": "float32", "adamw": adamw, **kwargs}
    return policy_config(
        name,
        dtensor_cfg=mesh,
        optimizer={"name": "torch.optim.Muon", "kwargs": muon},
        scheduler=LINEAR,
        train_global_batch_size=ROWS,
    )


class _Run:
    """A rank's part of a run."""

    def __init__(self, name: str, mesh: dict[str, Any], **kwargs: Any) -> None:
        self._config = _config(name, mesh, **kwargs)
        self._layout = ParallelLayout.of(self._config, dist.get_world_size())
        self.backend = DTensorBackend(self._config, CPU)
        gives_scores = dist.get_rank() in self._layout.result_ranks
        self.worker = PolicyWorker(self.backend, self._config, gives_scores=gives_scores)

    def train(self, *seeds: int) -> None:
        shard = self._layout.data_parallel_rank(dist.get_rank())
        for seed in seeds:
            data = random_batch(rows=ROWS, seed=seed)
            batch = shard_batch(data, self._layout.data_parallel_size, training_strategy(self._config))
            self.worker.train(batch.data[shard], batch.sizes[shard], WeightedNLL(), count_valid(data))

    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.backend.model.hf.named_parameters())

    def state(self) -> dict[str, Tensor]:
        """Return whole weights and optimizer states."""
        states = {
            name: {"weight": weight, **self.backend.optimizer.state[weight]} for name, weight in self.named().items()
        }
        return {
            f"{name}.{key}": whole(value).detach().clone()
            for name, of_weight in states.items()
            for key, value in of_weight.items()
        }


def _trained(rank: int, world_size: int, name: str, mesh: dict[str, Any]) -> dict[str, Tensor]:
    run = _Run(name, mesh)
    run.train(1, 2, 3)
    return run.state()


def test_one_rank_updates_as_the_optimizers_of_torch(tmp_path) -> None:
    """Given the gradients of the run, torch's optimizers make the same bits. The model has experts and a router."""
    with process_group():
        run = _Run(_save(tmp_path / "m", "qwen3_moe"), {}, ns_dtype="bfloat16")
        mine = run.named()
        copies = {name: weight.detach().clone() for name, weight in mine.items()}
        of_muon = {name for name in mine if any(part in name for part in MATRICES)}
        assert len(of_muon) == 12 and "model.layers.0.mlp.gate.weight" not in of_muon
        views = {name: list(copies[name]) if copies[name].dim() == 3 else [copies[name]] for name in of_muon}
        others = {name: [copies[name]] for name in mine if name not in of_muon}
        given = {name: [nn.Parameter(view) for view in parts] for name, parts in (views | others).items()}
        torchs = [
            torch.optim.Muon([p for name in of_muon for p in given[name]], lr=0.02, momentum=0.9),
            torch.optim.AdamW([given[name][0] for name in others], lr=1e-2, weight_decay=0.01),
        ]
        schedules = [torch.optim.lr_scheduler.LinearLR(each, **LINEAR["kwargs"]) for each in torchs]
        step = run.backend.clip_and_step

        def step_both() -> tuple[float, bool]:
            for name, parts in given.items():
                gradient = mine[name].grad.clone()
                for part, of_part in zip(parts, gradient if len(parts) > 1 else [gradient], strict=True):
                    part.grad = of_part
            for each in torchs:
                each.step()
            return step()

        run.backend.clip_and_step = step_both  # type: ignore[method-assign]
        for seed in range(3):
            run.train(seed)
            for each in schedules:
                each.step()
            assert_equal_states({name: weight.detach() for name, weight in mine.items()}, copies)


@pytest.mark.parametrize(
    ("architecture", "ranks", "mesh"),
    [
        ("qwen3", 2, {}),
        ("phi3", 4, {"tensor_parallel_size": 2}),
        ("qwen3_moe", 2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
        ("qwen3_moe", 4, {"expert_parallel_size": 2, "dp_replicate_size": 2}),
        ("gpt_oss", 4, {"expert_parallel_size": 2}),
        ("qwen3", 4, {"pipeline_parallel_size": 2, "cpu_offload": True}),
        ("qwen3", 2, {"context_parallel_size": 2}),
    ],
)
def test_meshes_equal_one_process(architecture, ranks, mesh, tmp_path) -> None:
    name = _save(tmp_path / "m", architecture)
    start = random_model(architecture, initializer_range=0.1, vocab_size=100).state_dict()
    want = run_ranks(_trained, 1, name, {})[0]
    found = {key: value for of_rank in run_ranks(_trained, ranks, name, mesh) for key, value in of_rank.items()}
    assert found.keys() == want.keys()
    assert sum(key.endswith("momentum_buffer") for key in found) in (8, 12, 14)
    for key, value in want.items():
        before = start[key.removesuffix(".weight")] if key.endswith(".weight") else torch.zeros_like(value)
        assert (found[key] - value).norm() <= TOLERANCE * (value - before).norm(), key


def _saves(rank: int, world_size: int, name: str, mesh: dict[str, Any], step: str) -> list[dict[str, Tensor]]:
    """Return the state at a save, and after two more updates."""
    run = _Run(name, mesh)
    run.train(1, 2)
    run.worker.save_checkpoint(f"{step}/weights", f"{step}/optimizer")
    saved = run.state()
    run.train(3, 4)
    return [saved, run.state()]


def _resumes(rank: int, world_size: int, name: str, mesh: dict[str, Any], step: str) -> list[dict[str, Tensor]]:
    run = _Run(name, mesh)
    run.worker.load_checkpoint(f"{step}/weights", f"{step}/optimizer")
    loaded = run.state()
    run.train(3, 4)
    return [loaded, run.state()]


EP2, TP2, PP2 = {"expert_parallel_size": 2}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


def _joined(parts: list[list[dict[str, Tensor]]], moment: int) -> dict[str, Tensor]:
    return {key: value for of_rank in parts for key, value in of_rank[moment].items()}


@pytest.mark.parametrize(("saved_on", "resumed_on"), [(EP2, [EP2, TP2]), (PP2, [PP2, {}])])
def test_a_resumed_run_is_equal_and_other_meshes_get_the_same_momentum(saved_on, resumed_on, tmp_path) -> None:
    name, step = _save(tmp_path / "m", "qwen3_moe"), str(tmp_path / "step")
    straight = run_ranks(_saves, 2, name, saved_on, step)
    start = random_model("qwen3_moe", initializer_range=0.1, vocab_size=100).state_dict()
    for mesh in resumed_on:
        resumed = run_ranks(_resumes, 2, name, mesh, step)
        assert_equal_states(_joined(resumed, 0), _joined(straight, 0))
        want, found = _joined(straight, 1), _joined(resumed, 1)
        if mesh == saved_on:
            assert_equal_states(found, want)
        for key, before in start.items():
            moved = want[f"{key}.weight"] - before
            assert (found[f"{key}.weight"] - want[f"{key}.weight"]).norm() <= TOLERANCE * moved.norm(), key


def test_changed_rates_hold_for_the_parts_that_they_name(tmp_path) -> None:
    """A resume with other arguments keeps momentum, and gives each part its own new arguments."""
    name, step = _save(tmp_path / "m", "qwen3"), str(tmp_path / "step")
    with process_group():
        _saves(0, 1, name, {}, step)
        changed = {"lr": 0.04, "adamw": {"lr": 2e-2, "weight_decay": 0.5, "betas": [0.7, 0.8]}}
        run = _Run(name, {}, **changed)
        run.worker.load_checkpoint(f"{step}/weights", f"{step}/optimizer")
        muon, adamw = run.backend.optimizer.param_groups
        assert (muon["lr"], muon["weight_decay"], muon["momentum"]) == (pytest.approx(0.03), 0.1, 0.9)
        assert (adamw["lr"], adamw["weight_decay"]) == (pytest.approx(0.015), 0.5)
        assert tuple(adamw["betas"]) == (0.7, 0.8)
        assert all(run.backend.optimizer.state[weight] for weight in run.named().values())
