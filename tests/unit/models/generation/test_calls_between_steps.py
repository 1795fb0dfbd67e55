"""A call of another process begins at the end of the step that runs, not several steps later."""

import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import ray
from busy_engine import STEP_S
from generation_helpers import ask, make_settings

from nemo_rl.config import ClusterConfig
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.generation.factory import make_engines


@pytest.mark.ray
@pytest.mark.parametrize("gap_s", [0.03, 0.7], ids=["one call after another", "after a pause"])
def test_a_call_waits_for_one_step(tmp_path: Path, local_ray: Path, gap_s: float) -> None:
    settings = make_settings(tmp_path, "busy_engine.BusyEngine", env_vars={"PYTHONPATH": str(Path(__file__).parent)})
    with ExitStack() as ends:
        where = RayVirtualCluster([1], use_gpus=False, cpus_per_bundle=0.5)
        ends.callback(where.shutdown)
        engines = make_engines(settings, where, ClusterConfig(device="cpu", gpus_per_node=0))
        ends.callback(engines.shutdown)

        def call(method: str, *args: Any) -> Any:
            return ray.get(engines.workers.run_single_worker_single_data(method, 0, *args), timeout=60)

        call("submit", [("endless", ask([1]))])
        waits = []
        for _ in range(9):
            sent = time.monotonic()
            call("responses_so_far", ["other"])
            waits.append(time.monotonic() - sent)
            time.sleep(gap_s)  # at other places of a step
    assert statistics.median(waits) < 1.6 * STEP_S, waits
