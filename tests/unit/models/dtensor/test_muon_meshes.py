"""Muon updates a model as torch does on one rank, has equal numbers on all meshes, and continues bit for bit."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import random_model
from parity.ranks import on_ranks
from policy_helpers import WeightedNLL, policy_config, process_group, random_batch, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from trained_states import assert_equal_states

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.ranks.placements import held_here, whole
from nemo_rl.distributed.ranks.whole_matrices import MatrixAxes
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker

CPU = torch.device("cpu")
ROWS = 8
MATRICES = ("_proj", "experts.gate_up_proj", "experts.down_proj")
LINEAR = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.5, "total_iters": 4}}
TOLERANCE = 5e-5
"""Largest difference of a weight's change. With Newton-Schulz steps in bfloat16, it is about 2e-2."""


type Save = Callable[[str], str]
"""Function from an architecture to the folder of its small random model."""


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    @cache
    def saved(architecture: str) -> str:
        folder = str(tmp_path_factory.mktemp(architecture))
        random_model(architecture, initializer_range=0.1, vocab_size=100).save_pretrained(folder)
        return folder

    return saved


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


def test_one_rank_updates_as_the_optimizers_of_torch(save: Save) -> None:
    """Given the gradients of the run, torch's optimizers make the same bits. The model has experts and a router."""
    with process_group():
        run = _Run(save("qwen3_moe"), {}, ns_dtype="bfloat16")
        mine = run.named()
        copies = {name: weight.detach().clone() for name, weight in mine.items()}
        of_muon = {name for name in mine if any(part in name for part in MATRICES)}
        assert len(of_muon) == 12 and "model.layers.0.mlp.gate.weight" not in of_muon
        views = {name: list(copies[name]) if copies[name].dim() == 3 else [copies[name]] for name in of_muon}
        others = {name: [copies[name]] for name in mine if name not in of_muon}
        given = {name: [nn.Parameter(view) for view in parts] for name, parts in (views | others).items()}
        torchs = [
            torch.optim.Muon([p for name in of_muon for p in given[name]], lr=0.02, momentum=0.9),
            torch.optim.AdamW([given[name][0] for name in others], lr=1e-2, weight_decay=0.01, fused=True),
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
def test_meshes_equal_one_process(architecture, ranks, mesh, save: Save) -> None:
    name = save(architecture)
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
def test_a_resumed_run_is_equal_and_other_meshes_get_the_same_momentum(
    saved_on, resumed_on, save: Save, tmp_path
) -> None:
    name, step = save("qwen3_moe"), str(tmp_path / "step")
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


def test_changed_rates_hold_for_the_parts_that_they_name(save: Save, tmp_path) -> None:
    """A resume with other arguments keeps momentum, and gives each part its own new arguments."""
    name, step = save("qwen3"), str(tmp_path / "step")
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


PLACEMENTS = {
    "rows and columns": [Shard(0), Shard(1)],
    "rows twice": [Shard(0), Shard(0)],
    "copies of columns": [Replicate(), Shard(1)],
    "columns of copies": [Shard(1), Replicate()],
    "copies": [Replicate(), Replicate()],
}
STACKED = {"experts and rows": [Shard(1), Shard(0)], "experts alone": [Shard(0), Replicate()]}


def _of_rows_and_columns(matrices: Tensor) -> Tensor:
    """Mix all elements of each matrix."""
    return matrices @ matrices.mT @ matrices


def _apply(kinds: dict[str, list[Any]], shape: tuple[int, ...], number: int) -> dict[str, list[Any]]:
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), {}
    for name, placements in kinds.items():
        tensors = [
            torch.arange(7.0 * 12, dtype=torch.float64)[: torch.Size(shape).numel()].view(shape) + 100 * k
            for k in range(number)
        ]
        parts = [distribute_tensor(tensor.clone(), mesh, placements) for tensor in tensors]
        computed: list[int] = [0]

        def count(matrices: Tensor) -> Tensor:
            computed[0] += len(matrices)  # noqa: B023
            return _of_rows_and_columns(matrices)

        stack = torch.stack([held_here(part) for part in parts])
        results = MatrixAxes.of(parts[0]).apply(count, stack.flatten(0, -3)).view(stack.shape)
        for part, result in zip(parts, results, strict=True):
            held_here(part).copy_(result)
        equal = [
            torch.equal(whole(part), _of_rows_and_columns(tensor)) for part, tensor in zip(parts, tensors, strict=True)
        ]
        found[name] = [all(equal), computed[0]]
    return found


@pytest.mark.parametrize("number", [1, 3, 6])
def test_divided_matrices_are_computed_whole(number: int) -> None:
    of_ranks = on_ranks(_apply, 4, PLACEMENTS, (5, 4), number)
    for name in PLACEMENTS:
        assert all(of_rank[name][0] for of_rank in of_ranks), name
        computed = [of_rank[name][1] for of_rank in of_ranks]
        assert sum(computed) == number and max(computed) - min(computed) <= 1 + (number == 6)


def test_experts_stay_with_their_ranks() -> None:
    of_ranks = on_ranks(_apply, 4, STACKED, (2, 6, 4), 2)
    for name in STACKED:
        assert all(of_rank[name][0] for of_rank in of_ranks), name
        assert [of_rank[name][1] for of_rank in of_ranks] == [1, 1, 1, 1]
