"""Attempts to leave a sandbox, to use up the machine and to survive, with every mechanism of this machine."""

import os
import signal
import subprocess
import sys
import time

import pytest
from attempts import EXHAUSTION, FILES, NETWORK, PROCESSES, SURVIVAL
from conftest import Run, processes_with

from nemo_rl.sandbox import End, Limits

LIMITS = Limits(wall_time_s=4, cpu_time_s=1, memory_mb=256, processes=8, file_mb=8, scratch_mb=16, output_bytes=100_000)
ESCAPES = FILES | PROCESSES | NETWORK
IN_CI = ("read a file", "kill the test", "connect to the machine", "run a program of the system", "mount")
HARMLESS_OUTSIDE = (
    *("read a file", "read a file through a link", "read users", "list the root of the parent", "list the repository"),
    *("read a test of the repository", "write next to a file", "change the mode of a file", "probe for the test"),
    *("read variables of the test", "read a variable", "run a program of the system", "connect to the machine"),
    *("send a datagram", "connect to a Unix socket", "connect to an abstract socket", "send to a Unix socket"),
    *("listen", "signal by the owner of a pipe", "signal through a descriptor"),
)


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


@pytest.mark.parametrize("name", quick(ESCAPES, IN_CI))
def test_no_program_gets_out(name, run: Run, machine):
    before, priority = _attributes(machine.secret), os.getpriority(os.PRIO_PROCESS, 0)
    outcome = run(machine.program(ESCAPES[name]), LIMITS)
    assert "ESCAPED" not in outcome.stdout, outcome
    assert outcome.stderr or outcome.exit_code or name in ("find an open folder", "read a variable"), outcome
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
