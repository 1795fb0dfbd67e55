"""Engines that die between the phases of a step, with real actors, a real sync, and memory used in turns."""

import asyncio
import importlib.util
import math
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from generation_helpers import (
    PROMPTS,
    ask,
    check_spans,
    greedy_reference,
    make_mixture,
    make_model,
    make_settings,
    save_model,
)
from local_policy import LocalPolicy
from processes_for_tests import is_alive, wait_until_gone

from nemo_rl.algorithms.rollout import refit
from nemo_rl.algorithms.rollout.refit import Engines, Refitter
from nemo_rl.algorithms.runtime.device_sharing import MemorySharing, TrainedModel
from nemo_rl.config import ClusterConfig
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.factory import make_engines
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult
from nemo_rl.utils.errors import DeadlineExceededError, WorkerDiedError
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.transport import TransportSpec
from nemo_rl.weight_sync.verify import SyncReceipt, check_receipts

pytestmark = pytest.mark.ray


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    thread = EventLoopThread()
    yield thread
    thread.close()


@pytest.fixture
def engines(tmp_path: Path, local_ray: Path) -> Iterator[EngineGroup]:
    save_model(tmp_path, make_model("qwen2", False, seed=0))
    cluster = ClusterConfig(device="cpu", gpus_per_node=0, max_actor_restarts=2)
    where = RayVirtualCluster([2], use_gpus=False, cpus_per_bundle=0.5)
    group = make_engines(
        make_settings(tmp_path, "hf", max_model_len=480, env_vars={"OMP_NUM_THREADS": "1"}), where, cluster
    )
    yield group
    group.shutdown()
    where.shutdown()


@pytest.fixture
def engine_of_ranks(tmp_path: Path, local_ray: Path) -> Iterator[EngineGroup]:
    """Start one vLLM engine of two ranks, which divide attention and have half of the experts each."""
    save_model(tmp_path, make_mixture("qwen3_moe", seed=0))
    cluster = ClusterConfig(device="cpu", gpus_per_node=0, max_actor_restarts=2)
    where = RayVirtualCluster([2], use_gpus=False, cpus_per_bundle=0.5)
    sizes = {"tensor_parallel_size": 2, "expert_parallel_size": 2}
    group = make_engines(make_settings(tmp_path, "vllm", load_weights=True, **sizes), where, cluster)
    yield group
    group.shutdown()
    where.shutdown()


def kill(engines: EngineGroup, index: int) -> None:
    os.kill(engines.workers.worker_metadata[index]["pid"], signal.SIGKILL)


async def generate_all(engines: EngineGroup, requests: list[GenerationRequest]) -> list[GenerationResult]:
    """Return the answers to requests of one tick, which are spread over all engines."""
    return list(await asyncio.gather(*(engines.generate(request) for request in requests)))


def answers(engines: EngineGroup, loop: EventLoopThread) -> list[list[int]]:
    """Return greedy answers to all prompts."""
    requests = [ask(prompt, temperature=0.0) for prompt in PROMPTS]
    return [result.token_ids.tolist() for result in loop.run(generate_all(engines, requests), 60, "answers")]


def test_engines_that_die_before_or_during_sleep_are_replaced(engines: EngineGroup, loop: EventLoopThread) -> None:
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


class SleepingEngines:
    """An `EngineGroup` that counts syncs; nothing else of it is called."""

    membership = 0
    weight_version = 0
    workers_per_engine = 1

    def __init__(self) -> None:
        self.load_weights, self.calls = None, []
        self.workers = SimpleNamespace(get_all_worker_results=lambda calls, timeout_s, what: [])

    def call_all(self, method: str) -> None:
        self.calls.append(method)

    def with_replacements(self, function):
        return function()

    def follow_number(self) -> None:
        pass

    def exclusively(self):
        return nullcontext()

    changing = exclusively


@pytest.mark.parametrize(("drops", "syncs"), [(False, 1), (True, 3)])
def test_engines_that_drop_their_weights_in_sleep_get_them_again(drops, syncs, monkeypatch) -> None:
    engines, policy = SleepingEngines(), LocalPolicy(make_model("qwen2", False, seed=1))
    memory = MemorySharing({"policy": TrainedModel(policy), "generation": Engines(engines, 60.0, drops)})  # type: ignore[arg-type]
    spec = TransportSpec("shared_memory", run_id="test")
    refitter = Refitter(policy, engines, spec, 60.0, memory)  # type: ignore[arg-type]
    receipt = SimpleNamespace(num_bytes=1, num_tensors=1)
    made: list[int] = []
    monkeypatch.setattr(refitter, "_sync_once", lambda: made.append(policy.weight_version) or [receipt])
    for _ in range(3):
        refitter.ensure_fresh()
        refitter.ensure_fresh()
        assert engines.weight_version == policy.weight_version
        refitter.before_training()
    assert len(made) == syncs
    assert engines.calls.count("sleep") == 3


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm")
def test_the_death_of_any_rank_replaces_its_engine(
    engine_of_ranks: EngineGroup, loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, receipts = engine_of_ranks, []

    def check(answered: list[SyncReceipt], buckets: list[Bucket], version: int) -> None:
        receipts.append([(receipt.receiver.partition(" on ")[0], receipt.version) for receipt in answered])
        check_receipts(answered, buckets, version)

    def of_both_ranks(version: int) -> list[tuple[str, int]]:
        return [("engine 0, worker 0", version), ("engine 0, worker 1", version)]

    monkeypatch.setattr(refit, "check_receipts", check)
    models = [make_mixture("qwen3_moe", seed) for seed in range(3)]
    expected = [[greedy_reference(model, prompt, 12) for prompt in PROMPTS] for model in models]
    assert answers(engines, loop) == expected[0]
    policy = LocalPolicy(models[1])
    refitter = Refitter(policy, engines, TransportSpec("shared_memory", run_id="test"), 60.0)
    refitter.ensure_fresh()
    assert answers(engines, loop) == expected[1]

    requests = [ask(prompt, temperature=0.0, max_new_tokens=200) for prompt in PROMPTS]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(loop.run, generate_all(engines, requests), 120, "answers")
        while not engines._members[0].unfinished:
            time.sleep(0.001)
        kill(engines, 1)
        results = waiting.result()
    assert (engines.num_restarts, receipts) == (1, [of_both_ranks(1)] * 2)
    for request, result in zip(requests, results, strict=True):
        assert len(result.token_ids) == 200
        check_spans(request, result, {1: models[1]}, [(0, 1)])

    ray.kill(engines.workers.workers[0])
    policy.model, policy.weight_version = models[2], 2
    refitter.ensure_fresh()
    assert (engines.num_restarts, receipts[2:]) == (2, [of_both_ranks(2)])
    assert answers(engines, loop) == expected[2]


def test_an_engine_revived_during_an_update_gets_complete_weights(engines: EngineGroup, loop: EventLoopThread) -> None:
    """The update is half done when the new engine needs weights: it waits and gets the next version."""
    old, new, trained = (make_model("qwen2", False, seed=seed) for seed in (1, 2, 1))
    policy = LocalPolicy(trained)
    refitter = Refitter(policy, engines, TransportSpec("shared_memory", run_id="test"), 60.0)
    refitter.ensure_fresh()
    requests = [ask(prompt, temperature=0.0, max_new_tokens=400) for prompt in PROMPTS]

    def until_the_new_engine_waits() -> None:
        kill(engines, 1)
        end = time.monotonic() + 60
        while engines._members[1].num_starts == 1:
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(1.0)
        assert (policy.num_streams, engines._members[1].is_down) == (1, True)

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(loop.run, generate_all(engines, requests), 120, "answers")
        while not all(member.unfinished for member in engines._members):
            time.sleep(0.001)
        policy.train(new, until_the_new_engine_waits)
        results = waiting.result()
    assert (policy.num_streams, engines.weight_version, engines.num_restarts) == (2, 2, 1)
    revived = [result for result in results if result.weight_versions == [(0, 2)]]
    assert len(revived) == 2, "what the dead engine had, the new one wrote"
    for request, result in zip(requests, results, strict=True):
        check_spans(request, result, {1: old, 2: new}, [tuple(span) for span in result.weight_versions])
    refitter.ensure_fresh()
    assert policy.num_streams == 2, "the training thread finds the weights where they belong"


def test_requests_of_a_collection_past_its_deadline_are_aborted(engines: EngineGroup, loop: EventLoopThread) -> None:
    def generate_of(num_tokens: int) -> Coroutine[Any, Any, list[GenerationResult]]:
        return generate_all(engines, [ask(prompt, max_new_tokens=num_tokens) for prompt in PROMPTS])

    def in_engines(look: Callable[[Any], Any]) -> list[Any]:
        actors = engines.workers.workers
        return ray.get([actor.__ray_call__.remote(lambda host: look(host._worker._engine)) for actor in actors])

    def until_idle() -> None:
        end = time.monotonic() + 20
        while in_engines(lambda engine: len(engine._running)) != [0, 0]:
            assert time.monotonic() < end, "the engines continue with requests that have no waiting caller"
            time.sleep(0.02)

    in_engines(lambda engine: engine._may_step.clear())
    with pytest.raises(DeadlineExceededError, match="too slow did not finish"):
        loop.run(generate_of(3), 1.0, "too slow")
    until_idle()
    in_engines(lambda engine: engine._may_step.set())
    assert len(loop.run(generate_of(3), 60, "after that")) == len(PROMPTS)
    other = EventLoopThread()
    asyncio.run_coroutine_threadsafe(generate_of(400), other._loop)
    while not all(member.unfinished for member in engines._members):
        time.sleep(0.001)
    other.close()
    assert len(loop.run(generate_of(3), 20, "after another loop stopped with requests under way")) == len(PROMPTS)
    until_idle()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(loop.run, generate_of(400), 60, "shut down")
        while not all(member.unfinished for member in engines._members):
            time.sleep(0.001)
        engines.shutdown()
        with pytest.raises(WorkerDiedError, match="been shut down"):
            waiting.result()
    assert engines.num_restarts == 0


def test_engines_leave_when_their_requests_are_answered_and_join_with_the_current_weights(
    tmp_path: Path, local_ray: Path, loop: EventLoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(tmp_path, make_model("qwen2", False, seed=0))
    models = [make_model("qwen2", False, seed=seed) for seed in (1, 2, 3)]
    where, file = RayVirtualCluster([2], use_gpus=False, cpus_per_bundle=0.5), tmp_path / "engines"
    settings = make_settings(tmp_path, "hf", max_model_len=480, env_vars={"OMP_NUM_THREADS": "1"})
    engines = make_engines(settings, where, ClusterConfig(device="cpu", gpus_per_node=0), str(file))
    policy = LocalPolicy(models[0])
    refitter = Refitter(policy, engines, TransportSpec("shared_memory", run_id="test"), 60.0)

    def step(version: int) -> list[GenerationResult]:
        policy.model, policy.weight_version = models[version - 1], version
        refitter.ensure_fresh()
        results = loop.run(generate_all(engines, [ask(p, temperature=0.0) for p in PROMPTS]), 60, "answers")
        expected = [greedy_reference(policy.model, prompt, 12) for prompt in PROMPTS]
        assert [result.token_ids.tolist() for result in results] == expected
        return results

    def served_by(results: list[GenerationResult]) -> set[tuple[int, int]]:
        return {(r.served_by.engine, r.served_by.num_starts) for r in results if r.served_by is not None}

    try:
        assert served_by(step(1)) == {(0, 1), (1, 1)}
        pids = [worker["pid"] for worker in engines.workers.worker_metadata]
        long = [ask(prompt, temperature=0.0, max_new_tokens=400) for prompt in PROMPTS]
        open_ones = loop.start(generate_all(engines, long), "long answers")
        while not all(member.unfinished for member in engines._members):
            time.sleep(0.001)
        file.write_text("1")
        for _ in range(3):
            refitter.ensure_fresh()
        assert engines._members[1].unfinished and is_alive(pids[1]), "it answers what it has"
        assert served_by(step(1)) == {(0, 1)}, "it gets no more"
        assert served_by(open_ones.result(120)) == {(0, 1), (1, 1)}
        refitter.ensure_fresh()
        assert wait_until_gone([pids[1]]) == [] and is_alive(pids[0])
        assert served_by(step(2)) == {(0, 1)} and math.isnan(engines.busy_seconds()[1])

        file.write_text("five")
        refitter.ensure_fresh()
        assert "holds 'five'; write one number from 1 to 2" in caplog.text
        file.write_text("2")
        end = time.monotonic() + 120
        while engines.num_workers == 1:
            assert time.monotonic() < end and served_by(step(2)) <= {(0, 1), (1, 2)}
        assert served_by(step(3)) == {(0, 1), (1, 2)}
        assert engines.num_restarts == 0
    finally:
        engines.shutdown()
        where.shutdown()
