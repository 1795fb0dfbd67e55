"""An address in RAY_ADDRESS where no Ray answers is refused within seconds, whatever answers there."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import nemo_rl
from nemo_rl.distributed.cluster import address as ray_address
from nemo_rl.distributed.cluster.address import require_cluster, unreachable
from nemo_rl.utils.addresses import cluster_address
from nemo_rl.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
HTTP = b"HTTP/1.1 400 Bad Request\r\n\r\n"


@contextmanager
def server(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """A server on this machine that does one thing with each connection; its address.

    It listens everywhere, as Ray replaces 127.0.0.1 by the address under which others reach this machine.
    """
    open_connections = []
    with socket.create_server(("0.0.0.0", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                open_connections.append(connection)
                answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    for connection in open_connections:
        connection.close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_address, "_CONNECT_S", 0.5)
    monkeypatch.setattr(ray_address, "_REACH_S", 1.5)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_port_where_no_process_listens_is_refused(scheme: str) -> None:
    with socket.socket() as bound:  # bound, but no process listens
        bound.bind(("127.0.0.1", 0))
        assert "Connection refused" in (unreachable(f"{scheme}127.0.0.1:{bound.getsockname()[1]}") or "")


@pytest.mark.parametrize("scheme", ["", "ray://"])
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda connection: None, "does not respond for 0.5 s"),
        (lambda connection: connection.sendall(HTTP), "another kind of server"),
        (lambda connection: connection.shutdown(socket.SHUT_RDWR), "is not Ray|reset by peer"),
    ],
    ids=["silent", "http", "closes"],
)
def test_a_server_other_than_ray_is_refused(scheme: str, answer: Callable[[socket.socket], object], said: str) -> None:
    with server(answer) as address:
        started = time.monotonic()
        trouble = unreachable(scheme + address)
    assert trouble is not None
    assert any(text in trouble for text in said.split("|")), trouble
    assert time.monotonic() - started < 20


def test_a_name_that_is_not_resolved_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: time.sleep(30))
    started = time.monotonic()
    assert "no connection within 1.5 s" in (unreachable("head:6379") or "")
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:port", "nosuch.invalid:6379"])
def test_invalid_addresses_are_refused(address: str) -> None:
    assert "no server answers" in (unreachable(address) or "")


def test_a_local_cluster_that_has_ended_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` reads a file that may be older than the cluster."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray/ray_current_cluster").write_text(f"127.0.0.1:{bound.getsockname()[1]}")
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        monkeypatch.setenv("RAY_ADDRESS", "auto")
        monkeypatch.setattr("ray._private.services.find_gcs_addresses", lambda: set())
        with pytest.raises(ConfigError, match=r"RAY_ADDRESS=auto: no server answers .*refused.*ray start --head"):
            require_cluster()


@pytest.mark.parametrize("value", [None, "", " ", "local"])
def test_a_run_with_its_own_ray_needs_no_cluster(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if value is not None:
        monkeypatch.setenv("RAY_ADDRESS", value)
    assert cluster_address() is None
    require_cluster()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_search_for_a_cluster(number: int, status: int, tmp_path: Path) -> None:
    """The server accepts the connection and stays silent, so that the run waits."""
    with server(lambda connection: None) as address:
        command = [sys.executable, "examples/run_sft.py", "--config", "examples/configs/sft_cpu.yaml"]
        command += [f"logger.log_dir={tmp_path}", f"checkpointing.checkpoint_dir={tmp_path}"]
        environment = os.environ | {"RAY_ADDRESS": address, "PYTHONPATH": str(ROOT)}
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        time.sleep(3.5)
        assert run.poll() is None, run.communicate()[1]
        run.send_signal(number)
        sent = time.monotonic()
        _, said = run.communicate(timeout=20)
    assert run.returncode == status, said
    assert "ended immediately" in said
    assert time.monotonic() - sent < 8, "the run gives the server 20 s"


def test_the_library_reads_ray_address_in_one_place() -> None:
    """Any other reader could take `local` or a blank for a cluster to join."""
    package = Path(nemo_rl.__file__).parent
    reading = re.compile(r"environ\W+(get\W+)?RAY_ADDRESS")
    assert [file.name for file in package.rglob("*.py") if reading.search(file.read_text())] == []
