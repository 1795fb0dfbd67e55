"""Groups of worker processes on a local Ray: order, sharding, errors, deadlines, endings."""

import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
import torch
from processes_for_tests import is_alive, wait_until_gone

from nemo_rl.distributed import virtual_cluster
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.named_sharding import REPLICATED_AXES, NamedSharding
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.files import trusted_code
from nemo_rl.utils.errors import (
    DeadlineExceededError,
    ResourceInsufficientError,
    WorkerDiedError,
)

pytestmark = pytest.mark.ray

ENV = {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def cluster(local_ray):
    cluster = RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=4, cpus_per_bundle=0.5)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def make_group(cluster):
    groups = []

    def make(name, *args, builder=None, **options):
        builder = builder or RayWorkerBuilder("sample_workers.Plain", *args)
        options.setdefault("env_vars", ENV)
        options.setdefault("setup_timeout_s", 60)
        groups.append(RayWorkerGroup(cluster, builder, name_prefix=name, **options))
        return groups[-1]

    yield make
    for group in groups:
        group.shutdown(force=True)


@pytest.fixture(scope="module")
def shared_group(cluster):
    group = RayWorkerGroup(cluster, RayWorkerBuilder("sample_workers.Plain"), name_prefix="shared", env_vars=ENV)
    yield group
    group.shutdown(force=True)


def test_a_worker_has_its_environment_name_and_log_link(shared_group, local_ray):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "OMP_NUM_THREADS"]
    got = shared_group.get_all_worker_results(shared_group.run_all_workers_single_data("environment", *names))
    assert [[env[n] for n in names] for env in got] == [
        ["0", "0", "2", "0", "127.0.0.1", "1"],
        ["1", "1", "2", "0", "127.0.0.1", "1"],
    ]
    ports = shared_group.get_all_worker_results(shared_group.run_all_workers_single_data("environment", "MASTER_PORT"))
    with socket.socket() as stranger, pytest.raises(OSError, match="already in use"):
        stranger.bind(("127.0.0.1", int(ports[0]["MASTER_PORT"])))
    assert ports[0] == ports[1]
    assert [m["name"] for m in shared_group.worker_metadata] == ["shared-0-0", "shared-0-1"]
    assert (local_ray / "ray_session" / "logs").is_dir()


def test_the_parts_of_the_start_are_measured_by_the_workers(make_group, monkeypatch):
    remote, classes = ray.remote, []
    monkeypatch.setattr(ray, "remote", lambda cls: classes.append(cls) or remote(cls))
    group = make_group("slow", builder=RayWorkerBuilder("sample_workers.SlowLast", 0.3))
    process, _, imports, waits, constructor = group.start_phases
    names = [phase.name for phase in group.start_phases]
    assert names == ["process", "arguments", "imports", "waiting", "constructor"]
    assert (waits.worker, waits.node) == ("slow-0-1", "127.0.0.1")
    assert waits.seconds >= 0.3 and waits.median == pytest.approx(waits.seconds / 2, abs=0.1)
    assert constructor.seconds < 0.3, "the phase within it does not count twice"
    assert process.seconds > 0 and imports.seconds > 0
    assert [cls.__name__ for cls in classes] == ["SlowLast"], "Ray sends each class that it gets to every worker"


def test_local_ray_starts_only_the_processes_that_a_run_uses(shared_group):
    started = set(ray._private.worker._global_node.all_processes)
    assert {"gcs_server", "raylet"} <= started <= {"gcs_server", "raylet", "reaper"}
    # Under `uv run` a worker would otherwise be started through uv again.
    assert not ray._private.ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV


def test_a_worker_without_tensors_never_loads_torch(shared_group):
    future = shared_group.run_all_workers_single_data("loaded", "torch")
    assert shared_group.get_all_worker_results(future) == [False, False]


def test_workers_run_the_code_that_the_driver_trusts(make_group, monkeypatch):
    monkeypatch.setattr(trusted_code, "_TRUSTED", {"a checksum"})
    group = make_group("trusting")
    assert group.get_all_worker_results(group.run_all_workers_single_data("trusted")) == [{"a checksum"}] * 2


def test_answers_come_in_rank_order_although_rank_1_is_first(shared_group):
    future = shared_group.run_all_workers_single_data("late_rank", base=10)
    assert shared_group.get_all_worker_results(future) == [10, 11]


def test_each_worker_gets_its_own_value(shared_group):
    future = shared_group.run_all_workers_multiple_data("echo", data=["a", "b"], common_kwargs={"factor": 3})
    assert shared_group.get_all_worker_results(future) == [(0, "a", 3), (1, "b", 3)]
    with pytest.raises(ValueError, match="3 values for 2 workers"):
        shared_group.run_all_workers_multiple_data("echo", data=["a", "b", "c"])


def test_sharded_calls_split_rows_and_replicated_axes_share_them(make_group):
    sharding = NamedSharding([[0], [1]], ["data_parallel", "tensor_parallel"])
    group = make_group("dp", sharding_annotations=sharding)
    future = group.run_all_workers_sharded_data("echo", data=[["x"], ["y"]], in_sharded_axes=["data_parallel"])
    assert group.get_all_worker_results(future) == [(0, ["x"], 1), (1, ["y"], 1)]
    assert (group.dp_size, group.get_dp_leader_worker_idx(1)) == (2, 1)

    group = make_group("tp", sharding_annotations=NamedSharding([[0, 1]], sharding.names))
    future = group.run_all_workers_sharded_data(
        "echo",
        data=["x"],
        in_sharded_axes=["data_parallel"],
        replicate_on_axes=["tensor_parallel"],
        output_is_replicated=["tensor_parallel"],
    )
    assert future.called_workers == [0, 1]
    assert group.get_all_worker_results(future) == [(0, "x", 1)]
    future = group.run_all_workers_sharded_data(
        "echo", data=["x"], in_sharded_axes=["data_parallel"], make_dummy_calls_to_free_axes=True
    )
    assert group.get_all_worker_results(future) == [(0, "x", 1), (1, None, 1)]


def test_ranks_of_a_layout_get_their_rows_and_answer_once(local_ray):
    wide = RayVirtualCluster([4], use_gpus=False, cpus_per_bundle=0.1)
    layout = ParallelLayout(dp_shard=2, tp=2)
    group = RayWorkerGroup(
        wide,
        RayWorkerBuilder("sample_workers.Plain"),
        name_prefix="layout",
        sharding_annotations=layout.sharding,
        env_vars=ENV,
    )
    try:
        asked = {"in_sharded_axes": ["data_parallel"], "replicate_on_axes": list(REPLICATED_AXES)}
        future = group.run_all_workers_sharded_data("echo", data=["a", "b"], **asked)
        assert group.get_all_worker_results(future) == [(0, "a", 1), (1, "a", 1), (2, "b", 1), (3, "b", 1)]
        once = group.run_all_workers_sharded_data(
            "echo", data=["a", "b"], return_from_workers=layout.result_ranks, **asked
        )
        assert once.called_workers == [0, 1, 2, 3]
        assert group.get_all_worker_results(once) == [(0, "a", 1), (2, "b", 1)]
        assert (group.dp_size, group.get_dp_leader_worker_idx(1)) == (2, 2)
    finally:
        group.shutdown(force=True)
        wide.shutdown()


def test_an_exception_in_one_rank_is_raised_while_the_other_hangs(make_group):
    group = make_group("raise")
    start = time.monotonic()
    with pytest.raises(ValueError, match="bad value on rank 1") as caught:
        group.get_all_worker_results(group.run_all_workers_single_data("raise_on", 1), timeout_s=60, phase="train")
    assert time.monotonic() - start < 45, "the deadline of the wait is 60 s"
    assert type(caught.value) is ValueError
    assert "raise-0-1 (rank 1" in caught.value.__notes__[0] and "'train'" in caught.value.__notes__[0]
    assert "sample_workers.py" in str(caught.value.__cause__)


def test_a_killed_worker_is_named_with_its_last_log_line_and_ends_the_group(make_group):
    group = make_group("die")
    pids = [m["pid"] for m in group.worker_metadata]
    with pytest.raises(WorkerDiedError) as caught:
        group.get_all_worker_results(group.run_all_workers_single_data("die_on", 1), timeout_s=60, phase="train")
    text = str(caught.value)
    assert "die-0-1 (rank 1, node 127.0.0.1" in text and "'train'" in text
    assert "last words of rank 1" in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    assert wait_until_gone(pids, 10) == []
    with pytest.raises(WorkerDiedError, match="has ended: Worker die-0-1"):
        group.run_all_workers_single_data("pid")


def test_a_death_is_reported_instead_of_the_broken_connection_it_causes(make_group):
    group = make_group("peer")
    with pytest.raises(WorkerDiedError, match=r"peer-0-1 \(rank 1") as caught:
        group.get_all_worker_results(group.run_all_workers_single_data("break_when_peer_dies", 1), timeout_s=60)
    assert "connection closed by peer" in caught.value.__notes__[0]


def test_a_missed_deadline_names_the_late_worker_and_where_it_hangs(make_group):
    group = make_group("late")
    with pytest.raises(DeadlineExceededError) as caught:
        group.get_all_worker_results(group.run_all_workers_single_data("hang_on", 1), timeout_s=1, phase="train")
    text = str(caught.value)
    assert "'train' did not finish within 1 s: no answer from 1 of 2 workers: late-0-1" in text
    assert re.search(r"Stacks of late-0-1.*\n(.*\n)*.*in stuck_in_c", text)
    assert "Stacks of late-0-0" in text


def test_a_deadline_ends_the_group_names_the_stopped_rank_and_shows_where_the_others_wait(make_group):
    group = make_group("halted")
    first, second = (m["pid"] for m in group.worker_metadata)
    os.kill(second, signal.SIGSTOP)
    with pytest.raises(DeadlineExceededError) as caught:
        group.get_all_worker_results(group.run_all_workers_single_data("hang_on", 0), timeout_s=1, phase="train")
    text = str(caught.value)
    assert f"Stopped (SIGSTOP) are halted-0-1 (rank 1, node 127.0.0.1, pid {second})" in text.splitlines()[0]
    assert re.search(r"Stacks of halted-0-0.*\n(.*\n)*.*in stuck_in_c", text)
    assert "(the process did not react to the signal; it is stopped (SIGSTOP))" in text
    assert wait_until_gone([first, second]) == []
    assert "did not finish" in group.find_loss(silence_is_loss=False)


def test_a_group_that_ended_is_restarted_as_a_whole_in_its_places(make_group):
    group = make_group("again")
    before = group.worker_metadata
    assert group.find_loss(silence_is_loss=True) is None
    os.kill(before[1]["pid"], signal.SIGKILL)
    assert "Worker again-0-1 (rank 1" in group.find_loss(silence_is_loss=False)
    assert wait_until_gone([m["pid"] for m in before]) == []
    with pytest.raises(WorkerDiedError, match="has ended: Worker again-0-1"):
        group.run_all_workers_single_data("pid")
    group.restart_all(60)
    assert group.find_loss(silence_is_loss=True) is None
    pids = group.get_all_worker_results(group.run_all_workers_single_data("pid"), timeout_s=30)
    assert not {*pids} & {m["pid"] for m in before}
    places = [{key: m[key] for key in ("name", "global_rank", "bundle_idx")} for m in group.worker_metadata]
    assert places == [{key: m[key] for key in places[0]} for m in before]
    group.shutdown(force=True)
    with pytest.raises(WorkerDiedError, match="has been shut down"):
        group.restart_all(60)


@pytest.mark.parametrize(("silence_is_loss", "is_lost"), [(True, True), (False, False)])
def test_a_busy_rank_is_lost_only_where_silence_counts(make_group, silence_is_loss, is_lost):
    group = make_group(f"busy{silence_is_loss}")
    group.run_single_worker_single_data("stuck_in_c", 0)
    assert (group.find_loss(silence_is_loss=silence_is_loss) is not None) == is_lost


def test_a_constructor_error_ends_the_half_built_group(make_group, cluster):
    with pytest.raises(ValueError, match="rank 1 cannot be built"):
        make_group("ctor", "hi", 1)
    make_group("ctor").shutdown()  # the names are free again


def test_coroutines_run_concurrently_and_a_stuck_one_is_shown(make_group):
    builder = RayWorkerBuilder("sample_workers.Meeting").asynchronous(max_concurrency=4)
    group = make_group("async", builder=builder, workers_per_node=1, ranks_per_unit=1)
    waiting = group.run_all_workers_single_data("wait_for_other")
    with pytest.raises(DeadlineExceededError, match=r"in wait_for_other\n.* in wait"):
        group.get_all_worker_results(waiting, timeout_s=0.5)
    group.get_worker_result(group.run_single_worker_single_data("arrive", 0), 0, timeout_s=20)
    assert group.get_all_worker_results(waiting, timeout_s=20) == ["met"]


def test_independent_workers_survive_a_death_and_can_be_replaced_until_the_group_ends(make_group):
    group = make_group("engine", builder=RayWorkerBuilder("sample_workers.Slow", 1.0), ranks_per_unit=1)
    first, second = (m["pid"] for m in group.worker_metadata)
    ref = group.run_single_worker_single_data("die_on", 1, 1)
    with pytest.raises(WorkerDiedError, match="engine-0-1"):
        group.get_worker_result(ref, 1, timeout_s=30)
    group.restart_workers([1], timeout_s=60)
    pids = group.get_all_worker_results(group.run_all_workers_single_data("pid"), timeout_s=30)
    assert pids[0] == first and pids[1] != second
    assert [m["pid"] for m in group.worker_metadata] == pids
    began = time.time()
    group.restart_workers([0, 1], timeout_s=60)
    spans = group.get_all_worker_results(group.run_all_workers_single_data("built_in"), timeout_s=30)
    assert began < max(start for start, _ in spans) < min(end for _, end in spans), "both are built at the same time"
    pids = [m["pid"] for m in group.worker_metadata]
    with ThreadPoolExecutor() as pool:
        again = pool.submit(group.restart_workers, [0, 1], 60.0)
        assert wait_until_gone(pids, 10) == []
        group.shutdown(force=True)
        with pytest.raises(WorkerDiedError, match="has been shut down"):
            again.result(20)
    assert [name for name in ray.util.list_named_actors() if name.startswith("engine-")] == []


def test_shutdown_leaves_no_process_not_even_grandchildren(make_group):
    group = make_group("end")
    pids = [m["pid"] for m in group.worker_metadata]
    children = group.get_all_worker_results(group.run_all_workers_single_data("spawn_child"))
    assert all(is_alive(pid) for pid in pids + children)
    assert group.shutdown(cleanup_method="cleanup", timeout=20)
    assert wait_until_gone(pids, 0) == []
    assert wait_until_gone(children, 10) == []
    assert group.shutdown()


def test_shutdown_kills_when_cleanup_hangs(make_group):
    group = make_group("stubborn")
    pids = [m["pid"] for m in group.worker_metadata]
    start = time.monotonic()
    assert not group.shutdown(cleanup_method="cleanup_forever", timeout=1)
    assert time.monotonic() - start < 60, "the clean-up never ends by itself"
    assert wait_until_gone(pids, 0) == []


def test_workers_exchange_tensors_and_run_collectives(make_group):
    group = make_group("torch", builder=RayWorkerBuilder("sample_workers.Tensors"))
    future = group.run_all_workers_single_data("all_reduce")
    assert group.get_all_worker_results(future, timeout_s=90) == [3.0, 3.0]

    big = BatchedDataDict({"x": torch.arange(16 * 2**20, dtype=torch.float32).view(64, -1)})
    rounds = []
    for _ in range(3):
        start = time.monotonic()
        ref = group.run_single_worker_single_data("give_back", 0, big)
        back = group.get_worker_result(ref, 0)
        rounds.append(time.monotonic() - start)
    assert torch.equal(back["x"], big["x"])
    print(f"64 MiB to a worker and back: {min(rounds) * 1000:.0f} ms")
    assert min(rounds) < 4.0

    totals = group.run_all_workers_sharded_data(
        "total", data=big.shard_by_batch_size(2), in_sharded_axes=["data_parallel"]
    )
    expected = [float(half.double().sum()) for half in big["x"].chunk(2)]
    assert group.get_all_worker_results(totals) == expected


def test_missing_resources_are_listed_immediately(local_ray):
    cluster = RayVirtualCluster([1], use_gpus=True, name="train")
    start = time.monotonic()
    with pytest.raises(ResourceInsufficientError) as caught:
        cluster.get_placement_groups()
    assert "1 GPU" in str(caught.value) and "127.0.0.1: 16 CPUs, 0 GPUs" in str(caught.value)
    assert time.monotonic() - start < 20
    with pytest.raises(ValueError, match="num_gpus_per_node=2"):
        RayVirtualCluster([4], num_gpus_per_node=2)


def test_resources_taken_by_others_are_waited_for(local_ray, monkeypatch):
    monkeypatch.setenv("NRL_VIRTUAL_CLUSTER_MAX_RETRIES", "0")
    monkeypatch.setattr(virtual_cluster, "_RESERVE_TIMEOUT_S", 1.5)
    free = ray.available_resources()["CPU"]
    holder = RayVirtualCluster([1], use_gpus=False, cpus_per_bundle=free)
    holder.get_placement_groups()
    late = RayVirtualCluster([1], use_gpus=False, cpus_per_bundle=1.5)
    with pytest.raises(ResourceInsufficientError, match=r"free now: [01]\S* CPUs"):
        late.get_placement_groups()
    holder.shutdown()
    monkeypatch.setenv("NRL_VIRTUAL_CLUSTER_MAX_RETRIES", "3")
    fitting = RayVirtualCluster([1], use_gpus=False, cpus_per_bundle=free)
    assert len(fitting.get_placement_groups()) == 1
    fitting.shutdown()


def test_local_ray_is_not_reachable_from_the_network(local_ray):
    address, port = ray.get_runtime_context().gcs_address.rsplit(":", 1)
    assert address == "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing, only looks up the outward address
        outward = probe.getsockname()[0]
    if outward.startswith("127."):
        pytest.skip("this machine has no outward address")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((outward, int(port)), timeout=5)


def test_more_bundles_than_cores_leave_room_for_others(local_ray):
    cluster = RayVirtualCluster([7], use_gpus=False)
    assert cluster.world_size() == 7 and cluster.node_count() == 1
    assert cluster.cpus_per_bundle() == 0.571  # 16 CPUs / (4 x 7)
    assert len(cluster.get_placement_groups()) == 1
    low, high = 21000, 21999
    ported = RayVirtualCluster([1], use_gpus=False, port_range_low=low, port_range_high=high)
    address, port = ported.get_master_address_and_port()
    assert address == "127.0.0.1" and low <= port <= high
    assert cluster.shutdown() and ported.shutdown() and not cluster.shutdown()


def test_no_process_outlives_a_killed_controller():
    script = textwrap.dedent("""
        import os, ray
        from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, init_ray
        from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
        os.environ.pop("RAY_ADDRESS", None)
        init_ray(num_cpus=1)
        group = RayWorkerGroup(
            RayVirtualCluster([1], use_gpus=False), RayWorkerBuilder("sample_workers.Plain")
        )
        child = group.get_worker_result(group.run_single_worker_single_data("spawn_child", 0), 0)
        group.run_all_workers_single_data("stuck_in_c")
        print("PIDS", group.worker_metadata[0]["pid"], child, flush=True)
        os.kill(os.getpid(), 9)
    """)
    env = {**os.environ, **ENV, "PYTHONPATH": f"{ENV['PYTHONPATH']}:{Path.cwd()}"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == -9, done.stderr
    pids = [int(word) for word in done.stdout.split("PIDS")[1].split()]
    assert wait_until_gone(pids, 60) == []
