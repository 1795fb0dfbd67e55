"""What programs in a sandbox are aimed at, and a check that nothing of them is left."""

import os
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import attempts
import psutil
import pytest

from nemo_rl.sandbox import Limits, Program, ProgramOutcome, Sandbox, why_unavailable
from nemo_rl.sandbox.mechanisms import IN_ORDER, Mechanism

Run = Callable[[str, Limits], ProgramOutcome]


def _name(mechanism: Mechanism) -> str:
    return f"{mechanism.name}-{mechanism.namespaces}"


@pytest.fixture(scope="session", params=IN_ORDER, ids=_name)
def mechanism(request: pytest.FixtureRequest) -> Mechanism:
    """Give each mechanism that works on this machine."""
    reason = why_unavailable(request.param)
    if reason is not None:
        pytest.skip(reason)
    return request.param


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[attempts.Machine]:
    """Prepare a file, sockets and a variable that must stay out of reach."""
    folder = tmp_path_factory.mktemp("outside")
    folder.chmod(0o777)
    secret = folder / "secret"
    secret.write_text("secret")
    secret.chmod(0o666)
    library = tmp_path_factory.mktemp("libraries") / "library"
    library.write_text("library")
    library.chmod(0o666)
    library.parent.chmod(0o777)
    abstract = f"sandbox-{uuid.uuid4()}"
    os.environ["SANDBOX_TEST_SECRET"] = "secret"
    with ExitStack() as sockets:
        server = sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = server.getsockname()[1]
        sockets.enter_context(socket.socket(type=socket.SOCK_DGRAM)).bind(("127.0.0.1", port))
        for address in (str(folder / "unix"), f"\0{abstract}"):
            stream = sockets.enter_context(socket.socket(socket.AF_UNIX))
            stream.bind(address)
            stream.listen()
        sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(str(folder / "datagram"))
        repository = Path(__file__).parents[3]
        unix, datagram = folder / "unix", folder / "datagram"
        yield attempts.Machine(secret, port, unix, datagram, abstract, os.getpid(), repository, library)
    del os.environ["SANDBOX_TEST_SECRET"]


@pytest.fixture
def scratch_folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the folder in which sandboxes of this test make theirs: other tests at the same time use another one."""
    with tempfile.TemporaryDirectory(prefix="scratch_folders_") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def run(mechanism: Mechanism, scratch_folders: Path, machine: attempts.Machine) -> Run:
    """Run a program, and check afterwards that none of its processes and files is left."""

    def run_and_check(source: str, limits: Limits) -> ProgramOutcome:
        mark = f"mark-{uuid.uuid4()}"
        outcome = Sandbox(limits, mechanism).run(Program(source, arguments=(mark,), readable=(str(machine.library),)))
        assert not [one for one in psutil.Process().children(recursive=True) if _runs_a_sandbox(one)]
        assert not processes_with(mark)
        assert not list(scratch_folders.iterdir())
        return outcome

    return run_and_check


def processes_with(mark: str) -> list[int]:
    """Return the processes of this machine that have a text among their arguments."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (place / "cmdline").read_bytes():
                found.append(int(place.name))
        except OSError:  # it has ended
            continue
    return found


def _runs_a_sandbox(process: psutil.Process) -> bool:
    try:
        return "sandbox" in " ".join(process.cmdline())
    except psutil.Error:
        return False
