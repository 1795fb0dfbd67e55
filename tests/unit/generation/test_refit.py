"""Engines that die between the phases of a step: real actors, a real sync, memory that takes turns."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from generation_helpers import PROMPTS, ask, greedy_reference, make_model, make_settings, save_model
from transformers import PreTrainedModel

from nemo_rl.algorithms.rollout.refit import Engines, Refitter
from nemo_rl.algorithms.runtime.memory import MemorySharing, TrainedModel
from nemo_rl.config import ClusterConfig
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, init_ray
from nemo_rl.distributed.worker_results import PendingCall
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.factory import make_engines
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.interfaces import TransportSpec

pytestmark = pytest.mark.ray


class LocalPolicy:
    """A policy of one rank that lives in this process."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.weight_version = 1
        self.moves: list[str] = []
        self._sender: WeightSender | None = None

    def begin_weight_stream(self, spec: TransportSpec) -> list[PendingCall]:
        self._sender = self._sender or WeightSender(spec, rank=0, is_node_leader=True)
        self._sender.begin(self.model.state_dict().items())
        return []

    def next_weight_bucket(self) -> Bucket:
        assert self._sender is not None
        return self._sender.next_bucket()

    def send_weight_bucket(self, bucket: Bucket) -> list[PendingCall]:
        return []

    def meeting_point(self) -> tuple[str, int]:
        raise AssertionError("shared memory needs no meeting point")

    def offload_optimizer(self) -> None:
        self.moves.append("offload")

    def onload_optimizer(self) -> None:
        self.moves.append("onload")


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    thread = EventLoopThread()
    yield thread
    thread.close()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[EngineGroup]:
    save_model(tmp_path, make_model("qwen2", False, seed=0))
    cluster = ClusterConfig(device="cpu", gpus_per_node=0, max_actor_restarts=2)
    init_ray(num_cpus=2)
    where = RayVirtualCluster([2], use_gpus=False, cpus_per_bundle=0.5)
    group = make_engines(make_settings(tmp_path, "hf"), where, cluster, {"OMP_NUM_THREADS": "1"})
    yield group
    group.shutdown()
    ray.shutdown()


def kill(engines: EngineGroup, index: int) -> None:
    os.kill(engines.workers.worker_metadata[index]["pid"], signal.SIGKILL)


def answers(engines: EngineGroup, loop: EventLoopThread) -> list[list[int]]:
    """Greedy answers to all prompts; requests of one tick are spread over all engines."""

    async def generate_all() -> list[list[int]]:
        waiting = [asyncio.ensure_future(engines.generate(ask(prompt, temperature=0.0))) for prompt in PROMPTS]
        return [result.token_ids for result in await asyncio.gather(*waiting)]

    return loop.run(generate_all(), 60, "answers")


def test_engines_that_die_asleep_or_before_they_sleep_are_replaced(engines: EngineGroup, loop: EventLoopThread) -> None:
    models = [make_model("qwen2", False, seed=seed) for seed in (1, 2)]
    expected = [[greedy_reference(model, prompt, 12) for prompt in PROMPTS] for model in models]
    assert expected[0] != expected[1]
    policy = LocalPolicy(models[0])
    spec = TransportSpec("shared_memory", run_id="test")
    memory = MemorySharing({"policy": TrainedModel(policy), "generation": Engines(engines, 60.0)})  # type: ignore[arg-type]
    refitter = Refitter(policy, engines, spec, 60.0, memory)

    refitter.ensure_fresh()
    assert answers(engines, loop) == expected[0]
    refitter.before_training()
    kill(engines, 1)
    refitter.ensure_fresh()
    assert engines.num_restarts == 1
    assert answers(engines, loop) == expected[0], "a replacement has the weights although they did not change"

    kill(engines, 0)
    refitter.before_training()
    assert engines.num_restarts == 2
    policy.model, policy.weight_version = models[1], 2
    refitter.ensure_fresh()
    assert answers(engines, loop) == expected[1]
    assert engines.weight_version == 2
    assert policy.moves == ["offload", "onload", "offload", "onload", "offload"]
