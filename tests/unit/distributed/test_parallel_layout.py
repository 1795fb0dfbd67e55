"""ParallelLayout against tables written by hand, in Ray workers and in gloo processes."""

import itertools
import os
import socket
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.named_sharding import REPLICATED_AXES
from nemo_rl.distributed.parallel_layout import AXES, ParallelLayout
from nemo_rl.distributed.ranks.process_group import device_mesh
from nemo_rl.distributed.workers.calls import plan_sharded_calls
from nemo_rl.utils.errors import ConfigError

SIXTEEN = ParallelLayout(pp=2, dp_shard=2, cp=2, tp=2)
PLACES = [
    # pipeline, data, context, tensor
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 1, 1),
    (0, 1, 0, 0), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 1, 1),
    (1, 0, 0, 0), (1, 0, 0, 1), (1, 0, 1, 0), (1, 0, 1, 1),
    (1, 1, 0, 0), (1, 1, 0, 1), (1, 1, 1, 0), (1, 1, 1, 1),
]  # fmt: skip


def test_sixteen_ranks_have_the_coordinates_of_the_table():
    assert (SIXTEEN.num_ranks, SIXTEEN.shape, SIXTEEN.data_parallel_size) == (16, (2, 1, 2, 2, 2), 2)
    assert [tuple(SIXTEEN.sharding.get_worker_coords(rank).values()) for rank in range(16)] == PLACES
    assert [SIXTEEN.data_parallel_rank(rank) for rank in range(16)] == [place[1] for place in PLACES]
    assert SIXTEEN.result_ranks == [8, 12]
    assert SIXTEEN.stage_ranks == [0, 8]


def test_rows_reach_all_ranks_of_a_shard_and_one_rank_answers():
    plan = plan_sharded_calls(
        SIXTEEN.sharding, ["data_parallel"], REPLICATED_AXES, [], return_from_workers=SIXTEEN.result_ranks
    )
    assert [call.worker_idx for call in plan] == list(range(16)), "every rank is called: calls are collective"
    assert [call.coords for call in plan] == [(data,) for _, data, _, _ in PLACES]
    assert [call.worker_idx for call in plan if call.is_wanted] == [8, 12]
    with pytest.raises(ValueError, match="not both"):
        plan_sharded_calls(SIXTEEN.sharding, ["data_parallel"], [], ["tensor_parallel"], return_from_workers=[0])


@pytest.mark.parametrize("sizes", [*itertools.product((1, 2), repeat=5), (1, 3, 2, 1, 2), (3, 1, 5, 2, 1)])
def test_any_layout_agrees_with_enumerated_coordinates(sizes):
    layout = ParallelLayout(*sizes)
    pp, replicas, shards, cp, tp = sizes
    rank = 0
    owners = []
    for stage, replica, shard, context, tensor in itertools.product(*map(range, sizes)):
        assert layout.data_parallel_rank(rank) == replica * shards + shard
        if (stage, context, tensor) == (pp - 1, 0, 0):
            owners.append(rank)
        rank += 1
    assert rank == layout.num_ranks
    assert layout.result_ranks == owners and len(owners) == replicas * shards == layout.data_parallel_size
    assert [layout.data_parallel_rank(owner) for owner in owners] == list(range(replicas * shards))
    assert layout.stage_ranks == [stage * replicas * shards * cp * tp for stage in range(pp)]


def own_backend(**sizes: int) -> PolicyConfig:
    return PolicyConfig.build(
        model_name="m", dtensor_cfg={"enabled": False}, training_backend={"name": "my.Backend", **sizes}
    )


def test_sizes_come_from_the_section_of_the_backend():
    assert ParallelLayout.of(PolicyConfig.build(model_name="m"), 4) == ParallelLayout(dp_shard=4)
    asked = own_backend(pipeline_parallel_size=2, context_parallel_size=2, tensor_parallel_size=2, dp_replicate_size=2)
    assert ParallelLayout.of(asked, 48) == ParallelLayout(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2)
    words = (
        r"20 ranks are no multiple of 16 \(pipeline_parallel_size=2 x dp_replicate_size=2 x context_parallel_size=2 x "
        r"tensor_parallel_size=2\)\. Nearest numbers of ranks: 16, 32\."
    )
    with pytest.raises(ConfigError, match=words):
        ParallelLayout.of(asked, 20)
    experts = own_backend(tensor_parallel_size=2, expert_parallel_size=4)
    assert ParallelLayout.of(experts, 8) == ParallelLayout(dp_shard=4, tp=2, ep=4)
    with pytest.raises(ConfigError, match=r"expert_parallel_size=4 does not divide the 6 ranks .* 6 / 4 = 1\.5"):
        ParallelLayout.of(experts, 6)


def _mesh_of_rank(rank: int, layout: ParallelLayout, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=layout.num_ranks)
    mesh = device_mesh(layout, "cpu")
    members = {axis: dist.get_process_group_ranks(mesh[axis].get_group()) for axis in AXES}
    with pytest.raises(ConfigError, match="has 2 ranks, the process group 4"):
        device_mesh(ParallelLayout(tp=2), "cpu")
    torch.save((list(mesh.get_coordinate() or ()), members), Path(folder) / str(rank))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork next to idle threads of torch
def test_the_mesh_of_real_processes_equals_the_layout():
    layout = ParallelLayout(dp_shard=2, tp=2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_mesh_of_rank, (layout, port, folder), nprocs=4, start_method="fork")
        got = [torch.load(Path(folder) / str(rank)) for rank in range(4)]
    assert [place for place, _ in got] == [[0, 0, 0, 0, 0], [0, 0, 0, 0, 1], [0, 0, 1, 0, 0], [0, 0, 1, 0, 1]]
    assert [members["tp"] for _, members in got] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [members["dp_shard"] for _, members in got] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [members["cp"] for _, members in got] == [[0], [1], [2], [3]]
