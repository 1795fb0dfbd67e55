"""Rendezvous of equal runs that start at the same time; each run is a process."""

import multiprocessing
import os
import socket
import sys
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import pytest
import torch.distributed as dist

from nemo_rl.distributed.ranks import process_group
from nemo_rl.distributed.ranks.process_group import choose_interface, init_process_group, open_store
from nemo_rl.distributed.ranks.rendezvous import bind_free_port, hold_port, take_port
from nemo_rl.host.device import Device
from nemo_rl.utils.errors import ResourceInsufficientError
from nemo_rl.utils.seed import set_seed

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

NUM_RUNS = 12
HERE = "127.0.0.1"
TIMEOUT = timedelta(seconds=20)


def play_run(answer: Connection, together: Barrier, low: int | None, high: int | None) -> None:
    """Act as rank 0 of a run: seed, choose a port, wait, and serve a process group there."""
    try:
        set_seed(42)
        together.wait(20)
        address, port = hold_port(HERE, low, high)
        together.wait(20)
        store = open_store(address, port, rank=0, world_size=1, timeout=TIMEOUT)
        store.set("port", str(port))
        together.wait(20)
        answer.send((port, store.get("port").decode()))
    except Exception as failure:
        answer.send(failure)


@pytest.mark.parametrize(("low", "high"), [(21000, 21063), (None, None)])
def test_concurrent_runs_rendezvous_at_separate_ports(low, high):
    context = multiprocessing.get_context("fork")
    together = context.Barrier(NUM_RUNS)
    pipes = [context.Pipe() for _ in range(NUM_RUNS)]
    runs = [context.Process(target=play_run, args=(theirs, together, low, high), daemon=True) for _, theirs in pipes]
    for run in runs:
        run.start()
    answers = [ours.recv() for ours, _ in pipes if ours.poll(60)]
    for run in runs:
        run.join(10)
    assert len({port for port, _ in answers}) == NUM_RUNS
    assert all(own == str(port) for port, own in answers)
    assert low is None or all(low <= port <= high for port, _ in answers)


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


IPV6 = pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6"))


@pytest.mark.parametrize("here", [HERE, IPV6])
def test_a_reserved_port_is_kept_until_a_store_of_this_process_listens(here):
    address, port = hold_port(here, None, None)
    family = socket.AF_INET6 if ":" in here else socket.AF_INET
    with socket.socket(family) as stranger, pytest.raises(OSError, match="already in use"):
        stranger.bind((address, port))
    server = open_store(address, port, rank=0, world_size=1, timeout=TIMEOUT)
    server.set("key", "value")
    assert take_port(port) is None
    peer = dist.TCPStore(address, port, 1, is_master=False, timeout=TIMEOUT)
    assert peer.get("key") == b"value"


@pytest.mark.skipif(sys.platform != "linux", reason="two sockets share a port in this way on Linux only")
def test_a_store_unaware_of_reserved_ports_may_listen_there():
    """`torch.distributed` does this for a worker class that joins its group by `env://`."""
    address, port = hold_port(HERE, None, None)
    store = dist.TCPStore(address, port, 1, is_master=True, timeout=TIMEOUT)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_range_without_a_free_port_is_refused_with_advice():
    with bind_free_port(HERE, None, None) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ResourceInsufficientError, match=rf"{port}\.\.{port} is free.*master_port_range_low"):
            hold_port(HERE, port, port)


def test_gloo_uses_the_interface_that_reaches_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(address: str, before: str | None = None) -> str | None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        if before is not None:
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", before)
        choose_interface(address)
        return os.environ.get("GLOO_SOCKET_IFNAME")

    assert [chosen(HERE), chosen("127.0.0.3"), chosen("localhost")] == ["lo"] * 3
    assert chosen(HERE, before="ib0") == "ib0"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        outward = probe.getsockname()[0]
    if outward.startswith("127."):
        pytest.skip("this machine has no outward address")
    name = chosen(outward)
    assert name in [name for _, name in socket.if_nameindex()] and name != "lo"
    dist.ProcessGroupGloo(dist.HashStore(), 0, 1, TIMEOUT)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    with pytest.raises(RuntimeError, match="no_such_interface"):
        dist.ProcessGroupGloo(dist.HashStore(), 0, 2, timedelta(seconds=1))


@pytest.mark.parametrize(
    ("kind", "binds", "bound"), [("cuda", True, "cuda:0"), ("cuda", False, None), ("cpu", True, None)]
)
def test_a_group_is_bound_to_a_gpu_unless_its_library_makes_many_groups(monkeypatch, kind, binds, bound) -> None:
    given = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **values: given.update(values))
    monkeypatch.setattr(process_group, "open_store", lambda *arguments: None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": HERE, "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    init_process_group(Device(kind), 5.0, binds_device=binds)
    device = given["device_id"]
    assert (None if device is None else str(device)) == bound


@pytest.mark.parametrize(("given", "seen"), [(None, "0"), ("1", "1")])
def test_the_default_group_does_not_end_its_process_after_another_group_failed(monkeypatch, given, seen) -> None:
    """torch reads the variable when it makes the group."""
    variable = "TORCH_NCCL_DUMP_ON_TIMEOUT"
    read = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: read.append(os.environ.get(variable)))
    monkeypatch.setattr(process_group, "open_store", lambda *arguments: None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": HERE, "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv(variable, given or "")
    if given is None:
        monkeypatch.delenv(variable)
    init_process_group(Device("cuda"), 5.0)
    assert read == [seen]
