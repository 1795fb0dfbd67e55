"""Environments whose actors run on a separate Python, with a package that the driver lacks."""

import asyncio
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from wheels_for_tests import make_wheel

from nemo_rl.config import ClusterConfig
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY, make_actor_runtime_env
from nemo_rl.environments.user_environments import environment_of, start_environment
from nemo_rl.utils.errors import ConfigError, VenvError

pytestmark = [
    pytest.mark.ray,
    pytest.mark.usefixtures("local_ray"),
    pytest.mark.skipif(not (os.environ.get("UV") or shutil.which("uv")), reason="uv is not here"),
]

ROOT = Path(__file__).resolve().parents[3]
SOURCE = """
import sys
import tiny_bonus  # only the environment's own Python has it
import torch
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn

class Bonus(EnvironmentInterface):
    max_concurrent_steps = 2

    def __init__(self, cfg):
        self.factor = cfg["factor"]

    def step(self, message_log_batch, metadata):
        size = len(metadata)
        rewards = torch.full((size,), tiny_bonus.BONUS * self.factor)
        replies = [{"role": "environment", "content": sys.executable}] * size
        return EnvironmentReturn(replies, metadata, [None] * size, rewards, torch.ones(size, dtype=torch.bool))

    def global_post_process_and_metrics(self, batch):
        return batch, {"seen": len(batch["rewards"])}
"""


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(tmp_path / "venvs"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_bonus.py").write_text(SOURCE)
    return make_wheel(tmp_path / "wheels", "tiny_bonus", "BONUS = 0.25\n")


def test_an_actor_runs_in_the_python_with_its_package(wheel, tmp_path):
    """The class is found by its path, as the configuration names it; the driver cannot import it."""
    cluster = ClusterConfig.build(device="cpu", venvs={"bonus": {"packages": [wheel]}})
    log = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        with ExitStack() as resources:
            client = start_environment(environment_of("bonus", "own_bonus.Bonus"), {"factor": 3.0}, cluster, resources)
            result = asyncio.run(client.step(log, {}))
            seconds.append(time.perf_counter() - start)
        assert (result.reward, result.error) == (0.75, None)
        assert result.observation["content"].startswith(str(tmp_path / "venvs" / "bonus-"))
        assert client._traits.concurrency == 2 and client._traits.hooks == {"global_post_process_and_metrics"}
    print(f"first start {seconds[0]:.1f} s, cached start {seconds[1]:.1f} s")
    assert importlib.util.find_spec("tiny_bonus") is None
    (python,) = (tmp_path / "venvs").glob("bonus-*/bin/python")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ACTOR_ENVIRONMENT_REGISTRY, "own_bonus.Bonus", str(python))
        assert make_actor_runtime_env("own_bonus.Bonus") == {"py_executable": str(python)}


def start_with(*packages: str) -> None:
    cluster = ClusterConfig.build(device="cpu", venvs={"bonus": {"packages": packages}})
    with ExitStack() as resources:
        start_environment(environment_of("bonus", "own_bonus.Bonus"), {"factor": 1.0}, cluster, resources)


@pytest.mark.usefixtures("wheel")
def test_a_node_that_cannot_make_the_python_is_named_before_anything_runs():
    with pytest.raises(VenvError, match=r"(?s)missing on 1 of 1 nodes:\nnode 127.0.0.1: .*no-such-package-at-all"):
        start_with("no-such-package-at-all")


@pytest.mark.long
def test_a_class_that_its_own_python_cannot_import_is_refused(wheel):
    with pytest.raises(ConfigError, match="own_bonus.Bonus.*No module named 'tiny_bonus'"):
        start_with(make_wheel(Path(wheel).parent, "other_thing", ""))
    assert sys.modules.get("tiny_bonus") is None


TWO_NODES = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1, env_vars={"UV": "/no/such/uv"})
import ray
ray.init(address=cluster.address)
from nemo_rl.config import VenvConfig
from nemo_rl.distributed.ray_actor_environment_registry import create_local_venv_on_each_node
from nemo_rl.utils.errors import VenvError
try:
    create_local_venv_on_each_node(VenvConfig.build(packages=[sys.argv[1]]), "bonus")
except VenvError as error:
    print("REFUSED", error)
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.long
def test_the_failing_node_of_two_is_named(wheel):
    """The second node has no uv; both have one address here."""
    done = subprocess.run(
        [sys.executable, "-c", TWO_NODES, wheel], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert "REFUSED The environment 'bonus' is missing on 1 of 2 nodes" in done.stdout, done.stdout + done.stderr
    assert "/no/such/uv" in done.stdout
