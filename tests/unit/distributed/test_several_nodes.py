"""Two Ray nodes: placement, checks at the start, and the loss of a node."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray_nodes import ray_nodes

from nemo_rl.distributed.cluster import joined_ray
from nemo_rl.distributed.cluster.node_choice import NodeRoom, choose_nodes, shortage

HERE = Path(__file__).parent
TOLD_SOON = {"health_check_period_ms": 1500, "health_check_failure_threshold": 3, "health_check_initial_delay_ms": 0}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of `nodes_driver` on two nodes, the second of which is killed on the way."""
    folder = tmp_path_factory.mktemp("nodes")
    with ray_nodes(16, 16, num_gpus=2, **TOLD_SOON) as nodes:
        environment = os.environ | {"RAY_ADDRESS": nodes.address, "PYTHONPATH": os.pathsep.join(sys.path)}
        environment["GLOO_SOCKET_IFNAME"] = "lo"
        command = [sys.executable, str(HERE / "nodes_driver.py"), str(folder / "found.json")]
        with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as driver:
            assert driver.stdout is not None
            for line in driver.stdout:
                if line.startswith("KILL"):
                    _, address, killed = line.split()
                    nodes.kill(address)
                    Path(killed).touch()
        assert driver.returncode == 0
    return dict(json.loads((folder / "found.json").read_text()))


@pytest.mark.ray
def test_entries_are_on_nodes_in_the_order_of_their_addresses(found: dict[str, Any]) -> None:
    first, second = "127.0.0.2", "127.0.0.3"
    assert found["spread"] == [[[first, second]]] * 2
    assert found["packed"] == [[first, first]]
    assert found["gpus"] == [[first, second], [second]], "a GPU that is taken is not waited for"
    assert found["apart"] == [[first], [second]]
    assert found["together"] == [[first, second], [first, second]]


@pytest.mark.ray
def test_missing_resources_are_reported_with_numbers(found: dict[str, Any]) -> None:
    assert found["three"] == (
        "ResourceInsufficientError: Cluster 'three' requests [1, 1, 1] bundles per node (STRICT_SPREAD), each with 1 "
        "CPUs. The nodes have: 127.0.0.2: 16 CPUs, 2 GPUs; 127.0.0.3: 16 CPUs, 2 GPUs. 1 node of that size missing."
    )


@pytest.mark.ray
def test_ranks_are_numbered_by_node_and_rendezvous_at_the_node_of_rank_0(found: dict[str, Any]) -> None:
    meeting = ["3", "127.0.0.2", "lo"]
    assert found["environment"] == [["0", "0", "0", *meeting], ["1", "1", "0", *meeting], ["2", "0", "1", *meeting]]
    assert found["where"] == ["127.0.0.2", "127.0.0.2", "127.0.0.3"]


@pytest.mark.ray
def test_nodes_are_compared_before_workers_start(found: dict[str, Any]) -> None:
    assert (found["same"], found["left"]) == ("", [])
    assert found["other"].startswith("ConfigError: Node 127.0.0.3 (id ")
    assert "policy.model_name=/proc/self/cwd/only_here is not there" in found["other"]
    assert "checkpoint_dir=/proc/self/cwd/only_here is not the driver's folder" in found["other"]
    assert "it runs nemo_rl " in found["code"] and "the driver 1.0 (code abc, in /opt)" in found["code"]
    assert found["not_moved"] == ""
    assert found["moved"].startswith("ConfigError: Node 127.0.0.3 (id ") and "it runs nemo_rl " in found["moved"]


@pytest.mark.ray
def test_the_loss_of_the_node_of_the_driver_is_named(found: dict[str, Any]) -> None:
    own = "RayDiedError: The node manager (raylet) of this machine, 127.0.0.2, in the joined cluster 127.0.0.2:"
    assert found["own"].startswith(own) and "the run's workers with it" in found["own"]
    assert found["own_s"] < 45, "the deadline of the wait is 60 s"


@pytest.mark.ray
def test_a_lost_node_is_named_by_whichever_call_fails_first(found: dict[str, Any]) -> None:
    assert found["policy"].startswith("NodeLostError: Node 127.0.0.3 (id ")
    assert "is lost: " in found["policy"] and "It ran policy-1-0 (rank 2)." in found["policy"]
    assert found["policy_s"] < 45, "the deadline of the wait is 60 s"
    assert found["engine"].startswith("NodeLostError: Node 127.0.0.3")
    assert "It ran engine-1-0 (rank 1)." in found["engine"]


@pytest.mark.ray
def test_independent_workers_move_to_nodes_with_free_resources(found: dict[str, Any]) -> None:
    assert found["in_vain"].startswith("NodeLostError: Node 127.0.0.3"), "the policy's rank was there too"
    assert "It ran policy-1-0 (rank 2)." in found["in_vain"]
    assert found["moved_to"] == "127.0.0.2"
    assert found["no_room"].startswith("ResourceInsufficientError: A node was lost, and no other has room. Cluster")
    assert "127.0.0.2: 16 CPUs, 2 GPUs (free now: " in found["no_room"]


def room(number: int, cpus: float, free: float | None = None) -> NodeRoom:
    address = f"10.0.0.{number}"
    return NodeRoom(f"id{number}", address, {"CPU": cpus}, {"CPU": cpus if free is None else free})


@pytest.mark.parametrize(
    ("counts", "strategy", "chosen"),
    [
        ([2, 2], "STRICT_SPREAD", ["id1", "id3"]),
        ([1, 4], "STRICT_SPREAD", ["id2", "id3"]),
        ([1, 1, 1, 1], "SPREAD", ["id1", "id2", "id3", "id1"]),
        ([1, 1], "PACK", ["id1", "id1"]),
        ([2, 2, 2], "STRICT_SPREAD", None),
        ([5], "SPREAD", None),
    ],
)
def test_nodes_are_chosen_by_free_resources_and_strategy(
    counts: list[int], strategy: str, chosen: list[str] | None
) -> None:
    nodes = [room(1, 2), room(2, 1), room(3, 4)]
    if counts == [1, 4]:
        nodes[0] = room(1, 2, free=0)
    assert choose_nodes(counts, {"CPU": 1.0}, nodes, strategy) == chosen


def in_domain(number: int, domain: str, rank: int, free: float = 4) -> NodeRoom:
    total = {"GPU": 4.0, f"nvlink_domain_{domain}": 1.0, "topo_rank": float(rank)}
    return NodeRoom(f"id{number}", f"10.0.0.{number}", total, {"GPU": free})


@pytest.mark.parametrize(
    ("domains", "entries", "size", "chosen"),
    [
        # Addresses alternate between two domains; each segment of two is in one of them.
        ("abab", 4, 2, [1, 3, 2, 4]),
        # The domain with an odd node gives whole segments only; the last, shorter segment takes what is left.
        ("aaabb", 5, 2, [1, 2, 4, 5, 3]),
        ("aab", 3, 3, None),
        ("aaab", 2, 2, [1, 2]),
        ("aaaa", 4, 8, [1, 2, 3, 4]),
    ],
)
def test_segments_are_in_one_nvlink_domain(domains: str, entries: int, size: int, chosen: list[int] | None) -> None:
    nodes = [in_domain(number, domain, number) for number, domain in enumerate(domains, 1)]
    found = choose_nodes([4] * entries, {"GPU": 1.0}, nodes, "STRICT_SPREAD", segment_size=size)
    assert found == (None if chosen is None else [f"id{number}" for number in chosen])


def test_nodes_of_a_segment_come_in_the_order_of_the_topology_and_free_ones_first() -> None:
    nodes = [in_domain(1, "a", 4), in_domain(2, "a", 3), in_domain(3, "b", 2, free=0), in_domain(4, "b", 1)]
    choose = partial(choose_nodes, [4, 4], {"GPU": 1.0}, strategy="STRICT_SPREAD", segment_size=2)
    assert choose(nodes) == ["id2", "id1"]
    assert choose(nodes, avoid={"id1"}) == ["id4", "id3"]
    assert choose(nodes, avoid={"id1", "id3"}) is None
    told = shortage([4, 4], {"GPU": 1.0}, nodes, "STRICT_SPREAD", {"id1", "id3"}, 2)
    assert "segment_size=2 needs as many nodes of one NVLink domain" in told and "nvlink_domain_a has 1" in told


def test_without_domains_segments_ask_for_nothing() -> None:
    nodes = [room(1, 2), room(2, 2)]
    assert choose_nodes([2, 2], {"CPU": 1.0}, nodes, "STRICT_SPREAD", segment_size=2) == ["id1", "id2"]


def test_nodes_of_other_workers_are_avoided() -> None:
    nodes = [room(1, 2), room(2, 2), room(3, 1)]
    assert choose_nodes([1], {"CPU": 2.0}, nodes, "STRICT_SPREAD", {"id1"}) == ["id2"]
    assert choose_nodes([1, 1], {"CPU": 2.0}, nodes, "STRICT_SPREAD", {"id1"}) is None
    assert shortage([1, 1], {"CPU": 2.0}, nodes, "STRICT_SPREAD", {"id1"}) == (
        "The nodes have: 10.0.0.1: 2 CPUs, 0 GPUs (taken by other workers of this run); 10.0.0.2: 2 CPUs, 0 GPUs; "
        "10.0.0.3: 1 CPUs, 0 GPUs (too small for 1 bundle). 1 node of that size missing."
    )


def test_a_silent_control_service_is_named_within_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    monkeypatch.setattr(joined_ray, "note_death", lambda node, obituary: noted.append(obituary))
    monkeypatch.setattr(joined_ray, "_PERIOD_S", 0.05)
    monkeypatch.setattr(joined_ray, "_GONE_S", 0.4)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        node: Any = SimpleNamespace(gcs_address=f"127.0.0.1:{port}")
        monkeypatch.setattr(joined_ray.ray._private.worker.global_worker, "node", node)
        watch = threading.Thread(target=joined_ray._await_control_service, args=(node,), daemon=True)
        watch.start()
        time.sleep(0.6)
        assert watch.is_alive() and noted == []
    watch.join(10)
    assert noted[0].startswith(
        f"The control service (gcs_server) of the joined cluster, 127.0.0.1:{port}, has not answered"
    )
    with monkeypatch.context() as left:  # a program that has left the cluster no longer polls
        left.setattr(joined_ray.ray._private.worker.global_worker, "node", None)
        joined_ray._await_control_service(node)
    assert len(noted) == 1


def test_a_closed_connection_alone_does_not_make_a_node_dead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    noted: list[str] = []
    monkeypatch.setattr(joined_ray, "note_death", lambda node, obituary: noted.append(obituary))
    monkeypatch.setattr(joined_ray, "_RETRY_S", 0.05)
    monkeypatch.chdir(tmp_path)  # a path of a socket has 108 bytes
    node: Any = SimpleNamespace(
        raylet_socket_name="raylet", node_ip_address="10.0.0.1", gcs_address="a:1", get_logs_dir_path=lambda: "logs"
    )
    monkeypatch.setattr(joined_ray.ray._private.worker.global_worker, "node", node)
    watch = threading.Thread(target=joined_ray._await_raylet, args=(node,), daemon=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("raylet")
        listening.listen()
        watch.start()
        for _ in range(3):
            listening.accept()[0].close()
        assert watch.is_alive() and noted == []
    watch.join(10)
    assert noted[0].startswith(
        "The node manager (raylet) of this machine, 10.0.0.1, in the joined cluster a:1, has ended"
    )
