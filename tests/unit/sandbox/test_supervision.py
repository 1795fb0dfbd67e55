"""What a program may tell the process that supervises it, and failures of that process."""

import errno
import itertools
import os
import resource
import subprocess
import time
import uuid
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from conftest import processes_with

from nemo_rl.sandbox import End, Limits, Program, Sandbox, why_unavailable
from nemo_rl.sandbox.mechanisms import LANDLOCK_ALONE, Mechanism
from nemo_rl.sandbox.supervision import Supervision
from nemo_rl.utils.errors import SandboxError

LIMITS = Limits(wall_time_s=10, cpu_time_s=10)
WRITES_TO_ALL = """
import os, sys
for number in range(3, 64):
    try:
        os.write(number, sys.argv[1].encode())
        print(number)
    except OSError:
        pass
"""


@pytest.mark.parametrize("report", ['{"child-pid": PID}', "[]"])
def test_a_program_cannot_name_a_process_to_be_killed(report: str, mechanism: Mechanism) -> None:
    with subprocess.Popen(["sleep", "60"]) as victim:
        text = report.replace("PID", str(victim.pid))
        outcome = Sandbox(LIMITS, mechanism).run(Program(WRITES_TO_ALL, arguments=(text,)))
        assert outcome.succeeded and outcome.stdout == "", outcome
        assert victim.poll() is None
        victim.kill()


@pytest.mark.parametrize("report", [b"[]", b"1", b'{"child-pid": "1"}', b'{"child-pid": -1}', b"{", b"\xff"])
def test_a_report_that_is_none_is_ignored(report: bytes) -> None:
    supervision: Any = SimpleNamespace(_control=SimpleNamespace(kept=b""), _info=SimpleNamespace(kept=report))
    assert Supervision._init_pid(supervision) is None


@pytest.mark.parametrize("call", [1, 2])
def test_a_process_that_cannot_be_watched_is_ended(
    call: int, mechanism: Mechanism, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first descriptor is that of the started process, the second one that of the namespace's first process."""
    if call == 2 and not mechanism.has_own_files:
        pytest.skip("no namespaces")
    sandbox, mark, opened, calls = Sandbox(LIMITS, mechanism), f"mark-{uuid.uuid4()}", os.pidfd_open, itertools.count(1)
    Sandbox(LIMITS, mechanism).run(Program(""))  # what is opened once is open now

    def fails(pid: int) -> int:
        if next(calls) >= call:
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(pid)

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "pidfd_open", fails)
    with pytest.raises(SandboxError, match="Too many open files"):
        sandbox.run(Program("import time\nwhile True: time.sleep(1)", arguments=(mark,)))
    assert len(os.listdir("/proc/self/fd")) == len(before)
    time.sleep(0.5)
    assert not processes_with(mark)
    assert not [one for one in psutil.Process().children(recursive=True) if "jail" in " ".join(one.cmdline())]


def test_descriptors_may_have_large_numbers(mechanism: Mechanism) -> None:
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, old[1]), old[1]))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        assert Sandbox(LIMITS, mechanism).run(Program("print(1)")).stdout == "1\n"
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, old)


def test_orphans_that_have_ended_do_not_count(mechanism: Mechanism) -> None:
    code = """
import os, time
for _ in range(60):
    time.sleep(0.01)
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print("done")
"""
    if not mechanism.has_own_files:
        pytest.skip("programs start no processes there")
    outcome = Sandbox(Limits(processes=8, wall_time_s=20), mechanism).run(Program(code))
    assert outcome.succeeded and outcome.stdout == "done\n", outcome


@pytest.mark.parametrize("processes", [3, 16])
def test_the_kernel_allows_as_many_processes_as_the_limit_says(mechanism: Mechanism, processes: int) -> None:
    code = """
import os, sys, threading, time
count, patience = 1, time.monotonic() + 2  # processes that started this one may still be ending
while True:
    try:
        child = os.fork()
    except OSError:
        if time.monotonic() > patience:
            break
        time.sleep(0.05)
        continue
    if child == 0:
        time.sleep(60)
    count += 1
    time.sleep(0.002)
try:
    threading.Thread(target=print).start()
except RuntimeError:
    print("no thread either")
time.sleep(0.5)  # several looks from outside
print(count)
"""
    if not mechanism.has_own_files:
        pytest.skip("programs start no processes there")
    outcome = Sandbox(Limits(processes=processes, wall_time_s=20), mechanism).run(Program(code))
    assert outcome.succeeded and outcome.stdout == f"no thread either\n{processes}\n", outcome


def test_a_program_that_asks_for_processes_again_and_again_ends_by_time(mechanism: Mechanism) -> None:
    code = """
import os, time
while True:
    try:
        if os.fork() == 0 and os.getpid() % 2:
            os._exit(0)
    except OSError:
        time.sleep(0.001)
"""
    if not mechanism.has_own_files:
        pytest.skip("programs start no processes there")
    outcome = Sandbox(Limits(processes=8, wall_time_s=3, cpu_time_s=60), mechanism).run(Program(code))
    assert outcome.end is End.WALL_TIME, outcome


def test_threads_are_counted_where_programs_start_no_processes() -> None:
    if reason := why_unavailable(LANDLOCK_ALONE):
        pytest.skip(reason)
    code = """
import sys, threading, time
for _ in range(int(sys.argv[1])):
    threading.Thread(target=time.sleep, args=(0.5,)).start()
"""
    ends = [
        Sandbox(Limits(processes=8, wall_time_s=20), LANDLOCK_ALONE).run(Program(code, arguments=(str(count),))).end
        for count in (7, 8)
    ]
    assert ends == [End.EXITED, End.PROCESSES]
