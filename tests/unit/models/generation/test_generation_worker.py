"""The actor around an engine, run here with the Hugging Face engine: requests, refusals, weight updates."""

import asyncio
import os
import time

import pytest
import torch
from generation_helpers import MAX_MODEL_LEN, PROMPTS, ask, greedy_reference, make_model, make_settings, save_model

from nemo_rl.models.generation.worker import GenerationWorker
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.lanes import Lane
from nemo_rl.weight_sync.parts import WholeWeights
from nemo_rl.weight_sync.transport import TransportSpec
from nemo_rl.weight_sync.verify import check_receipts

pytestmark = pytest.mark.asyncio

SPEC = TransportSpec("shared_memory", run_id="test", bucket_size_bytes=50_000)


@pytest.fixture
def worker(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "2")
    save_model(tmp_path, make_model("qwen2", True, seed=1))
    return GenerationWorker(make_settings(tmp_path, "hf"))


async def collect_all(worker: GenerationWorker, count: int) -> dict:
    results: dict = {}
    while len(results) < count:
        results.update((await asyncio.wait_for(worker.collect(), 20)).results)
    return results


async def test_an_engine_outlives_a_failed_broadcast(monkeypatch, tmp_path):
    """vLLM makes its default group in the engine, and torch reads the variable there."""
    variable, seen = "TORCH_NCCL_DUMP_ON_TIMEOUT", []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(variable, "")
    monkeypatch.delenv(variable)
    monkeypatch.setattr("nemo_rl.models.generation.worker.make_engine", lambda *_: seen.append(os.environ[variable]))
    GenerationWorker(make_settings(tmp_path, "hf"))
    assert seen == ["0"]


async def test_answers_come_back_under_their_request_ids(worker):
    assert await worker.ready() == 2
    await worker.submit([("a", ask(PROMPTS[0])), ("b", ask(PROMPTS[1]))])
    await worker.submit([("c", ask(PROMPTS[2])), ("refused", ask([1] * MAX_MODEL_LEN))])
    results = await collect_all(worker, 4)
    lengths = {name: len(result.token_ids) for name, result in results.items()}
    assert lengths == {
        "a": 12,
        "b": 12,
        "c": 12,
        "refused": 0,
    }
    assert "does not fit" in results["refused"].error
    assert results["a"].error is None


async def test_collect_waits_for_a_later_request(worker):
    waiting = asyncio.create_task(worker.collect())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await worker.submit([("late", ask([5], max_new_tokens=1))])
    assert [name for name, _ in (await asyncio.wait_for(waiting, 20)).results] == ["late"]


async def test_a_later_call_of_collect_gets_the_results(worker):
    """The caller of the first one may have died."""
    of_dead_caller = asyncio.create_task(worker.collect())
    await asyncio.sleep(0.05)
    waiting = asyncio.create_task(worker.collect())
    await asyncio.sleep(0.05)
    await worker.submit([("x", ask([5], max_new_tokens=1))])
    assert [name for name, _ in (await asyncio.wait_for(waiting, 20)).results] == ["x"]
    assert (await asyncio.wait_for(of_dead_caller, 20)).results == []


async def test_the_engine_takes_no_step_during_a_weight_update(worker):
    """A half-finished request waits, and continues with the new weights."""
    new = make_model("qwen2", True, seed=2)
    sender = WeightSender([Lane(SPEC)], rank=0, is_node_leader=True)
    steps = []
    step = worker._engine.step
    # The pauses keep a fast engine from finishing before the update begins.
    worker._engine.step = lambda: steps.append(1) or time.sleep(0.02) or step()
    await worker.submit([("x", ask(PROMPTS[3], temperature=0.0))])
    while len(steps) < 3:
        await asyncio.sleep(0)
    await worker.begin_weight_update(SPEC, version=9)
    taken = len(steps)
    sender.begin(WholeWeights(new.named_parameters))
    buckets = []
    while not buckets or not buckets[-1].is_last:
        buckets.append(sender.next_buckets()[0])
        await worker.receive_bucket(buckets[-1])
        await asyncio.sleep(0.02)
    assert len(buckets) > 1
    assert len(steps) == taken
    check_receipts([await worker.finish_weight_update(9)], buckets, 9)
    await worker.begin_weight_update(SPEC, version=10)
    await asyncio.sleep(0.02)
    assert len(steps) == taken, "a second update began at once"
    sender.begin(WholeWeights(new.named_parameters))
    while not (bucket := sender.next_buckets()[0]).is_last:
        await worker.receive_bucket(bucket)
    await worker.receive_bucket(bucket)
    await worker.finish_weight_update(10)
    result = (await collect_all(worker, 1))["x"]
    assert result.weight_versions == [(0, 0), (taken, 10)]
    assert len(result.token_ids) == 12
    await worker.submit([("y", ask(PROMPTS[3], temperature=0.0))])
    assert (await collect_all(worker, 1))["y"].token_ids.tolist() == greedy_reference(new, PROMPTS[3], 12)
    sender.close()


async def test_an_engine_failure_is_raised_by_collect(worker):
    def broken_step():
        raise torch.OutOfMemoryError("no memory left")

    worker._engine.step = broken_step
    await worker.submit([("x", ask([1]))])
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        await asyncio.wait_for(worker.collect(), 20)


async def test_aborted_requests_return_their_partial_response(worker):
    """One running, one waiting, one finished, and one unknown request."""
    await worker.submit([("a", ask(PROMPTS[0], temperature=0.0)), ("b", ask(PROMPTS[1], temperature=0.0))])
    while worker._engine.num_tokens("a") < 5:
        await asyncio.sleep(0)
    await worker.submit([("c", ask(PROMPTS[2]))])
    await worker.abort(["a", "c", "unknown"])
    results = await collect_all(worker, 3)
    model = make_model("qwen2", True, seed=1)
    assert {name: (result.token_ids.tolist(), result.finish_reason) for name, result in results.items()} == {
        "a": (greedy_reference(model, PROMPTS[0], 5), "abort"),
        "b": (greedy_reference(model, PROMPTS[1], 12), "length"),
        "c": ([], "abort"),
    }
    await worker.abort(["a", "b"])
    await worker.submit([("d", ask(PROMPTS[3], temperature=0.0))])
    results = await collect_all(worker, 1)
    assert results["d"].token_ids.tolist() == greedy_reference(model, PROMPTS[3], 12)


async def test_requests_can_be_aborted_during_a_weight_update(worker):
    await worker.submit([("a", ask(PROMPTS[0], max_new_tokens=200))])
    await worker.begin_weight_update(SPEC, version=1)
    await worker.abort(["a"])
    assert (await collect_all(worker, 1))["a"].finish_reason == "abort"
    await worker.finish_weight_update(1)
    await worker.submit([("b", ask(PROMPTS[0]))])
    result = (await collect_all(worker, 1))["b"]
    assert (len(result.token_ids), result.weight_versions) == (12, [(0, 1)])
