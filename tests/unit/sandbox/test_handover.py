"""A program in a sandbox reaches the one server that it is given, and leaves files; nothing else is opened by that."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import attempts
import pytest
from attempts import NETWORK

from nemo_rl.sandbox import End, Limits, Program, Sandbox, handover
from nemo_rl.sandbox.handover import relay
from nemo_rl.sandbox.mechanisms import Mechanism
from nemo_rl.sandbox.plan import with_links
from nemo_rl.utils.errors import SandboxError

LIMITS = Limits(wall_time_s=20, cpu_time_s=10)
TALK = """
import socket
with socket.create_connection(("127.0.0.1", PORT)) as server:
    server.sendall(b"question")
    server.shutdown(socket.SHUT_WR)
    print(server.makefile().read())
"""


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Give a server that answers each connection with what was sent, twice."""

    def answer(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as sent:
            connection.sendall(sent.read() * 2)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def own_network(mechanism: Mechanism) -> Mechanism:
    """Give each mechanism of this machine that has namespaces."""
    if not mechanism.has_own_files:
        pytest.skip("no namespaces")
    return mechanism


def port_of(server: socket.socket) -> int:
    return server.getsockname()[1]


def test_a_program_talks_with_its_server(own_network: Mechanism, server: socket.socket) -> None:
    program = Program(TALK.replace("PORT", str(port_of(server))), address=("127.0.0.1", port_of(server)))
    outcome = Sandbox(LIMITS, own_network).run(program)
    assert outcome.stdout == "questionquestion\n", outcome
    refused = Sandbox(LIMITS, own_network).run(Program(program.source))
    assert "PermissionError" in refused.stderr


def test_a_program_finds_a_privileged_port_at_another_one(
    own_network: Mechanism, server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = (socket.gethostbyname("localhost"), port_of(server))
    relayed: list[tuple[str, int]] = []

    def to_the_server(listener: socket.socket, address: tuple[str, int], stopped: socket.socket) -> None:
        relayed.append(address)
        relay(listener, real, stopped)

    monkeypatch.setattr(handover, "relay", to_the_server)
    program = Program(TALK, address=("127.0.0.1", 80))
    program = replace(program, source=TALK.replace("PORT", str(program.port_inside)))
    assert Sandbox(LIMITS, own_network).run(program).stdout == "questionquestion\n"
    assert relayed == [("127.0.0.1", 80)]


@pytest.mark.parametrize("name", NETWORK)
def test_an_address_opens_nothing_else(
    name: str, own_network: Mechanism, server: socket.socket, machine: attempts.Machine
) -> None:
    if name == "listen":
        pytest.skip("a program with an address may listen in its own namespace")
    program = Program(machine.program(NETWORK[name]), address=("127.0.0.1", port_of(server)))
    assert "ESCAPED" not in Sandbox(LIMITS, own_network).run(program).stdout


def test_a_server_that_is_gone_and_a_program_that_hangs(own_network: Mechanism) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = ("127.0.0.1", port_of(server))
    talk = Program(TALK.replace("PORT", str(address[1])), address=address)
    assert Sandbox(LIMITS, own_network).run(talk).end is End.EXITED
    hang = Program("import time\nwhile True: time.sleep(1)", address=address, returned=("file",))
    outcome = Sandbox(Limits(wall_time_s=0.5), own_network).run(hang)
    assert outcome.end is End.WALL_TIME and not outcome.files


def test_without_namespaces_an_address_is_refused(mechanism: Mechanism) -> None:
    if mechanism.has_own_files:
        pytest.skip("it has namespaces")
    with pytest.raises(SandboxError, match="needs namespaces"):
        Sandbox(LIMITS, mechanism).run(Program("", address=("127.0.0.1", 65009)))


def test_files_are_read_at_the_end(mechanism: Mechanism) -> None:
    code = """
import os
open("good.new", "w").write("content")
os.replace("good.new", "good")
open("large", "w").write("x" * 70000)
os.mkdir("folder")
os.symlink("/etc/passwd", "link")
"""
    names = ("good", "large", "folder", "link", "missing")
    outcome = Sandbox(LIMITS, mechanism).run(Program(code, returned=names, returned_bytes=65536))
    unreadable = dict.fromkeys(("large", "folder", "link"))
    assert outcome.succeeded and outcome.files == {"good": b"content", **unreadable}, outcome


def test_a_command_has_its_variables_and_paths(
    own_network: Mechanism, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("readable")
    folder.chmod(0o755)
    (folder / "file").write_text("content")
    command = ("/bin/sh", "-c", f'read text < {folder}/file; echo "$text $OWN $HOME"')
    program = Program(command=command, environment={"OWN": "mine"}, readable=("/bin/sh", str(folder)))
    outcome = Sandbox(LIMITS, own_network).run(program)
    assert outcome.stdout == "content mine /scratch\n", outcome


def test_a_command_that_cannot_be_run_has_status_127(mechanism: Mechanism) -> None:
    outcome = Sandbox(LIMITS, mechanism).run(Program(command=("/no/such/program",)))
    assert outcome.exit_code == 127 and "/no/such/program" in outcome.stderr, outcome


def test_links_on_the_way_to_a_path_are_found(tmp_path) -> None:
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "real" / "file").write_text("")
    (tmp_path / "first").symlink_to("real")
    (tmp_path / "second").symlink_to(tmp_path / "first" / "inner")
    (tmp_path / "circle").symlink_to("circle")
    given = [str(tmp_path / name) for name in ("second", "first/file", "circle", "missing", "real/inner")]
    found = ["second", "first", "real/inner", "real/file"]
    assert with_links(given) == [str(tmp_path / name) for name in found]
    assert with_links([*given, str(tmp_path / "real")]) == [str(tmp_path / n) for n in ("second", "first", "real")]


def test_a_name_is_resolved_once_and_with_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_RESOLVE_DEADLINE_S", 0.2)
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **more: released.wait(20))
    started = time.monotonic()
    with pytest.raises(SandboxError, match="not resolved"):
        handover.Handover(("somewhere", 80))
    assert time.monotonic() - started < 5
    released.set()
    monkeypatch.undo()
    with pytest.raises(SandboxError, match="is unknown"):
        handover.Handover(("no such host", 80))
    assert handover._resolved("localhost", 80) in (("127.0.0.1", 80), ("::1", 80))


def test_a_relay_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(handover, "_END_DEADLINE_S", 0.2)
    released = threading.Event()
    monkeypatch.setattr(handover, "relay", lambda *arguments: released.wait(20))
    started = time.monotonic()
    with pytest.raises(SandboxError, match="did not end"), handover.Handover(("127.0.0.1", 80)) as taken:
        listener = socket.create_server(("127.0.0.1", 0))
        with socket.socket(fileno=os.dup(taken.inside)) as inside:
            socket.send_fds(inside, [b"1"], [os.open(tmp_path, os.O_RDONLY), listener.fileno()])
        taken.files([], 1)
    assert time.monotonic() - started < 5
    released.set()


def test_no_other_process_gets_what_was_handed_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    folder = os.open(tmp_path, os.O_RDONLY)
    with handover.Handover(None) as taken, socket.socket(fileno=os.dup(taken.inside)) as inside:
        socket.send_fds(inside, [b"1"], [folder])
        assert taken.files(["file"], 10) == {"file": b"content"}
        assert taken._folder is not None and not os.get_inheritable(taken._folder)
    before = len(os.listdir("/proc/self/fd"))
    with handover.Handover(("127.0.0.1", 80)) as taken, socket.socket(fileno=os.dup(taken.inside)) as inside:
        socket.send_fds(inside, [b"1"], [folder])
        with pytest.raises(SandboxError, match="could not be opened"):
            taken.files(["file"], 10)
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(folder)
