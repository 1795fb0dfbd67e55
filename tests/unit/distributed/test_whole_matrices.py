"""A function of whole matrices has the same results wherever their parts are, and ranks divide the matrices."""

from typing import Any

import pytest
import torch
from parity.ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from nemo_rl.distributed.ranks.placements import held_here, whole
from nemo_rl.distributed.ranks.whole_matrices import MatrixAxes

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
