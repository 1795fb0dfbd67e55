"""Attempts to leave a sandbox, to use up the machine and to survive, with every mechanism of this machine."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from attempts import ESCAPES, EXHAUSTION, FILL_SOCKETS, MOVES, SURVIVAL, TRUNCATIONS, Machine
from conftest import Run, processes_with

from nemo_rl import sandbox
from nemo_rl.sandbox import End, Limits, Program, Sandbox, why_unavailable
from nemo_rl.sandbox.mechanisms import BUBBLEWRAP, LANDLOCK, LANDLOCK_ALONE
from nemo_rl.utils.errors import SandboxError

LIMITS = Limits(wall_time_s=4, cpu_time_s=1, memory_mb=256, processes=8, file_mb=8, scratch_mb=16, output_bytes=100_000)
IN_CI = ("read a file", "kill the test", "connect to the machine", "run a program of the system", "mount")
HARMLESS_OUTSIDE = (
    *("read a file", "read a file through a link", "read users", "list the root of the parent", "list the repository"),
    *("read a test of the repository", "write next to a file", "change the mode of a file", "probe for the test"),
    *("read variables of the test", "read a variable", "run a program of the system", "connect to the machine"),
    *("send a datagram", "connect to a Unix socket", "connect to an abstract socket", "send to a Unix socket"),
    *("listen", "signal by the owner of a pipe", "signal through a descriptor", "raise the buffer of a socket"),
    *("raise a pipe", "make a queue of messages", "make semaphores", "make a timer", "hold a lock of a range"),
    *("ask for the group of the parent", "ask for the session of the parent", "ask for the clock of the parent"),
    *("ask for the priority of the parent", "ask for the processors of the parent"),
    *("ask for the capabilities of the parent",),
)


REFUSED_ANYWHERE = (
    *("empty a file through a handle for paths", "empty a library by its descriptor", "map a library for writing"),
    "change the flags of a library",
)
PRINT_NOTHING = ("find an open folder", "read a variable")
FOLDERS_OF_ITS_OWN = {"list home", "list the repository", "import the library"}
"""In a root of its own a program may see the folders that lead to its libraries, where no Landlock hides them."""
NEWEST_LANDLOCK = 7
"""Newest version of Landlock whose rules the tests apply one by one."""


def quick(names, in_ci):
    """Mark what CI leaves out."""
    return [name if name in in_ci else pytest.param(name, marks=pytest.mark.long) for name in names]


def test_there_are_at_least_sixty_attempts():
    assert len(ESCAPES) + len(EXHAUSTION) + len(SURVIVAL) >= 60


@pytest.mark.parametrize("name", HARMLESS_OUTSIDE)
def test_an_attempt_succeeds_without_a_sandbox(name, machine):
    source = machine.program(ESCAPES[name])
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=machine.secret.parent)
    for made in ("new", "link"):
        (machine.secret.parent / made).unlink(missing_ok=True)
    assert "ESCAPED" in done.stdout, done.stderr


@pytest.mark.parametrize("name", [*TRUNCATIONS, *MOVES])
def test_an_attempt_on_a_file_succeeds_without_a_sandbox(name, machine, tmp_path):
    """Otherwise its failure in a sandbox would say nothing."""
    if name in REFUSED_ANYWHERE:
        pytest.skip("the kernel refuses it to everybody")
    mine = _with_own_files(machine, tmp_path)
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "main.py").write_text("other bytes")
    command = [sys.executable, "-c", mine.program(ESCAPES[name])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "scratch")
    assert "ESCAPED" in done.stdout, done.stderr


def _with_own_files(machine: Machine, folder: Path) -> Machine:
    """Return what attempts are aimed at, with files that only one test uses."""
    places = {}
    for name in ("secret", "library"):
        place = folder / f"of_{name}"
        place.mkdir()
        (place / name).write_text(name)
        place.chmod(0o777)
        (place / name).chmod(0o666)
        places[name] = place / name
    return replace(machine, **places)


@pytest.mark.parametrize("name", quick(ESCAPES, IN_CI))
def test_no_program_gets_out(name, run: Run, machine):
    before, priority = _attributes(machine.secret), os.getpriority(os.PRIO_PROCESS, 0)
    outcome = run(machine.program(ESCAPES[name]), LIMITS)
    assert "ESCAPED" not in outcome.stdout, outcome
    assert outcome.stderr or outcome.exit_code or name in PRINT_NOTHING, outcome
    assert machine.secret.read_text() == "secret" and _attributes(machine.secret) == before
    assert not (machine.secret.parent / "new").exists()
    assert os.getpriority(os.PRIO_PROCESS, 0) == priority


def _attributes(path):
    found = path.stat()
    return found.st_mode, found.st_uid, found.st_mtime, found.st_size, found.st_nlink


@pytest.mark.parametrize("name", quick(EXHAUSTION, ("print 1 GB", "take memory at once", "write a large file")))
def test_no_program_uses_up_the_machine(name, run: Run, machine):
    source, ends = EXHAUSTION[name]
    started = time.monotonic()
    outcome = run(machine.program(source), LIMITS)
    assert outcome.end in ends, outcome
    assert "ESCAPED" not in outcome.stdout
    assert len(outcome.stdout) <= LIMITS.output_bytes and len(outcome.stderr) <= LIMITS.output_bytes
    assert outcome.wall_time_s < LIMITS.wall_time_s + 20 and time.monotonic() - started < 60
    assert outcome.cpu_time_s < LIMITS.cpu_time_s * 3 + 1


def test_buffers_of_sockets_count_as_memory(mechanism, run: Run, machine):
    if not mechanism.has_own_files:
        pytest.skip("it starts no processes")
    limits = replace(LIMITS, memory_mb=128)
    assert run(machine.program(FILL_SOCKETS), limits).end is End.MEMORY
    used = replace(limits, wall_time_s=1)
    outcome = run(machine.program(FILL_SOCKETS.replace("range(60)", "range(1)")), used)
    assert outcome.end is End.WALL_TIME, "a few sockets are no reason to end a program"


def test_sqlite_works_in_a_sandbox(run: Run):
    source = """
import sqlite3
with sqlite3.connect("file.db") as base:
    base.execute("create table numbers (one integer)")
    base.execute("insert into numbers values (7)")
print(sqlite3.connect("file.db").execute("select one from numbers").fetchall())
"""
    outcome = run(source, LIMITS)
    assert outcome.stdout == "[(7,)]\n", outcome


@pytest.mark.parametrize("name", quick(SURVIVAL, ("leave a child of a child", "ignore signals")))
def test_no_process_survives(name, run: Run, machine):
    outcome = run(machine.program(SURVIVAL[name]), LIMITS)
    assert outcome.end in (End.EXITED, End.WALL_TIME, End.CPU_TIME), outcome


def test_programs_end_with_the_process_that_runs_them(mechanism):
    code = (
        "from nemo_rl.sandbox import *\nfrom nemo_rl.sandbox.mechanisms import Mechanism\n"
        f"Sandbox(mechanism=Mechanism({mechanism.name!r}, {mechanism.namespaces!r})).run("
        "Program('import time\\nwhile True: time.sleep(1)', arguments=('mark-of-an-orphan',)))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not processes_with("main.py\0mark-of-an-orphan") and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while (left := processes_with("main.py\0mark-of-an-orphan")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


@pytest.mark.parametrize("version", [pytest.param(one, marks=pytest.mark.long) for one in range(NEWEST_LANDLOCK + 1)])
@pytest.mark.parametrize("kind", [BUBBLEWRAP, LANDLOCK, LANDLOCK_ALONE], ids=lambda one: f"{one.name}-{one.namespaces}")
def test_no_program_gets_out_with_the_rules_of_any_version_of_landlock(kind, version, machine, tmp_path_factory):
    """Each mechanism either refuses a version of the kernel's rules, or holds against all attempts with it."""
    mechanism = replace(kind, newest_landlock=version)
    if why_unavailable(kind) is not None:
        pytest.skip(why_unavailable(kind))
    if version < {"none": 3, "own": 1, "outer": 0}[kind.namespaces]:
        with pytest.raises(SandboxError, match="Landlock"):
            Sandbox(LIMITS, mechanism).run(Program("print(1)"))
        return
    mine = _with_own_files(machine, _open_folder(tmp_path_factory))
    before = [_attributes(path) for path in (mine.secret, mine.library)]
    runner = Sandbox(LIMITS, mechanism)

    def run(name: str) -> tuple[str, sandbox.Outcome]:
        return name, runner.run(Program(mine.program(ESCAPES[name]), readable=(str(mine.library),)))

    with ThreadPoolExecutor(4) as threads:
        outcomes = dict(threads.map(run, ESCAPES))
    print(f"{kind.name} (namespaces: {kind.namespaces}), Landlock {version}: {len(outcomes)} attempts")
    assert len(outcomes) >= 60
    found = {name for name, one in outcomes.items() if "ESCAPED" in one.stdout}
    assert found <= (FOLDERS_OF_ITS_OWN if version == 0 else set())
    silent = [name for name, one in outcomes.items() if not (one.stderr or one.exit_code or name in found)]
    assert set(silent) <= set(PRINT_NOTHING)
    assert (mine.secret.read_text(), mine.library.read_text()) == ("secret", "library")
    assert [_attributes(path) for path in (mine.secret, mine.library)] == before
    assert [one.name for path in (mine.secret, mine.library) for one in path.parent.iterdir()] == ["secret", "library"]


def _open_folder(tmp_path_factory) -> Path:
    """Return a folder that every user may enter."""
    folder = tmp_path_factory.mktemp("of_versions")
    folder.chmod(0o755)
    return folder


@pytest.mark.parametrize("version", range(1, NEWEST_LANDLOCK + 1))
@pytest.mark.parametrize("call", ["os.truncate(PATH, 0)", "os.open(PATH, 3 | os.O_TRUNC)"])
def test_rules_before_version_three_let_a_program_empty_files(version, call, tmp_path):
    """Why `landlock` without namespaces refuses them."""
    path = tmp_path / "file"
    path.write_text("text")
    jail = Path(sandbox.__file__).parent / "jail"
    code = f"""
import os, sys
sys.path.insert(0, {str(jail)!r})
import identity, landlock
PATH = {str(path)!r}
identity.drop()
if landlock.version(None) < {version}: sys.exit(3)
landlock.restrict({version}, ["/usr"], [], [], False)
{call}
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip(f"the kernel has no version {version}")
    assert path.read_text() == ("" if version < 3 else "text")
    assert ("PermissionError" in done.stderr) == (version >= 3)
