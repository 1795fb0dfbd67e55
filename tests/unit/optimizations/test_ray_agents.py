"""The replacements for Ray's agents exit with their raylet."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl.optimizations import ray_agents


@pytest.mark.parametrize("kind", [("dashboard",), ("runtime_env", "127.0.0.1", sys.executable)])
def test_an_agent_whose_raylet_has_ended_before_it_began_ends(kind: tuple[str, ...], tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    name, *rest = kind
    command = [sys.executable, "-I", "-S", ray_agents.__file__, name, str(tmp_path), "node", *rest]
    subprocess.run(command, env=os.environ | {"RAY_RAYLET_PID": str(ended.pid)}, check=True, timeout=10)
    assert list(tmp_path.glob("*_node"))
