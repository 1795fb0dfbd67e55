"""NamedSharding and the plan of sharded calls."""

import itertools

import numpy as np
import pytest

from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.workers.builder import plan_places
from nemo_rl.distributed.workers.calls import check_nesting, plan_sharded_calls, workers_at_zero

AXES = ["pipeline_parallel", "data_parallel", "tensor_parallel"]


@pytest.fixture
def sharding() -> NamedSharding:
    """2 x 2 x 2 workers, numbered row by row."""
    return NamedSharding.from_axis_sizes(dict.fromkeys(AXES, 2))


def test_coordinates_are_row_major(sharding):
    for rank, at in enumerate(itertools.product(range(2), repeat=3)):
        assert sharding.get_worker_coords(rank) == dict(zip(AXES, at, strict=True))
    assert sharding.shape == dict.fromkeys(AXES, 2)
    assert (sharding.ndim, sharding.size, sharding.names) == (3, 8, AXES)
    assert sharding.get_axis_index("tensor_parallel") == 2
    assert sharding.get_axis_size("data_parallel") == 2


def test_ranks_are_found_by_coordinates(sharding):
    assert sharding.get_ranks_by_coord(data_parallel=1) == [2, 3, 6, 7]
    assert sharding.get_ranks_by_coord() == list(range(8))
    assert sharding.get_ranks(pipeline_parallel=1, data_parallel=0, tensor_parallel=1) == 5
    expected = NamedSharding([[0, 1], [4, 5]], ["pipeline_parallel", "tensor_parallel"])
    assert sharding.get_ranks(data_parallel=0) == expected


def test_the_layout_is_read_only(sharding):
    layout = sharding.layout
    layout[0, 0, 0] = 99
    assert sharding.layout[0, 0, 0] == 0 and layout.dtype == np.int32


@pytest.mark.parametrize(
    ("layout", "names", "message"),
    [
        ([0, 1], ["a", "b"], "1 dimensions but 2 names"),
        ([[0, 1]], ["a", "a"], "differ"),
        ([0, 0], ["a"], "more than once"),
        ([0.5, 1], ["a"], "integer"),
        ([[0], [1, 2]], ["a", "b"], "inhomogeneous"),
    ],
)
def test_bad_layouts_are_refused(layout, names, message):
    with pytest.raises(ValueError, match=message):
        NamedSharding(layout, names)


def test_unknown_positions_are_refused(sharding):
    with pytest.raises(ValueError, match="unknown axis 'x'"):
        sharding.get_ranks_by_coord(x=0)
    with pytest.raises(ValueError, match=r"outside of 0\.\.1"):
        sharding.get_ranks(data_parallel=2)
    with pytest.raises(ValueError, match="worker 8"):
        sharding.get_worker_coords(8)


def test_replicated_call_reaches_all_and_returns_one_answer_per_shard(sharding):
    plan = plan_sharded_calls(
        sharding,
        ["data_parallel"],
        ["tensor_parallel", "pipeline_parallel"],
        ["tensor_parallel", "pipeline_parallel"],
    )
    assert [call.worker_idx for call in plan] == list(range(8))
    assert [call.coords for call in plan] == [(0,), (0,), (1,), (1,)] * 2
    assert [call.worker_idx for call in plan if call.is_wanted] == [0, 2]


def test_free_axes_call_position_zero_only_or_with_no_data(sharding):
    plan = plan_sharded_calls(sharding, ["data_parallel", "tensor_parallel"], [], [])
    assert [(call.worker_idx, call.coords) for call in plan] == [
        (0, (0, 0)),
        (1, (0, 1)),
        (2, (1, 0)),
        (3, (1, 1)),
    ]
    dummies = plan_sharded_calls(sharding, ["data_parallel", "tensor_parallel"], [], [], True)
    assert [call.coords for call in dummies[4:]] == [None] * 4


def test_a_plan_refuses_contradictory_axes(sharding):
    with pytest.raises(ValueError, match="both sharded and replicated"):
        plan_sharded_calls(sharding, ["data_parallel"], ["data_parallel"], [])
    with pytest.raises(ValueError, match="unknown axis"):
        plan_sharded_calls(sharding, ["dp"], [], [])
    with pytest.raises(ValueError, match="data must be a list of 2 shards, got 3"):
        check_nesting({"data": [1, 2, 3]}, [2])
    with pytest.raises(ValueError, match="data must be a list of 3 shards, got int"):
        check_nesting({"data": [1, 2]}, [2, 3])
    check_nesting({"data": [[1, 2, 3], [4, 5, 6]]}, [2, 3])


def test_workers_at_zero_are_those_at_position_zero_of_the_axes(sharding):
    assert workers_at_zero(sharding, ["pipeline_parallel", "tensor_parallel"]) == [0, 2]
    assert workers_at_zero(sharding, []) == list(range(8))


def test_worker_places_follow_the_bundles():
    def rows(*args):
        return [(p.node_idx, p.local_rank, p.bundle_idx) for p in plan_places(*args)]

    assert rows([2, 1], None, None) == [(0, 0, 0), (0, 1, 1), (1, 0, 0)]
    assert rows([2, 2], 1, None) == [(0, 0, 0), (1, 0, 0)]
    assert rows([4], None, [(0, [1, 3])]) == [(0, 0, 1), (0, 1, 3)]
    with pytest.raises(ValueError, match="bundle 2 of node 0"):
        plan_places([2], 3, None)
    with pytest.raises(ValueError, match="not both"):
        plan_places([2], 1, [(0, [0])])
