"""What a program may tell the process that supervises it, and failures of that process."""

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.sandbox import Limits, Program, Sandbox
from nemo_rl.sandbox.mechanisms import Mechanism
from nemo_rl.sandbox.supervision import Supervision

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
