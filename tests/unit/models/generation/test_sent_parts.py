"""Engines of several ranks receive only the parts of the weights that they read, over a real collective."""

import importlib.util
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from generation_helpers import PROMPTS, ask, greedy_reference, make_mixture, make_model, make_settings, save_model
from local_policy import LocalPolicy
from transformers import PreTrainedModel

from nemo_rl.algorithms.rollout import refit
from nemo_rl.algorithms.rollout.refit import Refitter
from nemo_rl.config import ClusterConfig
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.factory import make_engines
from nemo_rl.models.generation.interfaces import GenerationResult
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.transport import TransportSpec
from nemo_rl.weight_sync.verify import SyncReceipt, check_receipts

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]

CASES = [
    pytest.param(lambda seed: make_mixture("qwen3_moe", seed), {"expert_parallel_size": 2}, 0.75, id="experts"),
    pytest.param(lambda seed: make_mixture("qwen3_moe", seed), {}, 0.75, id="moe", marks=pytest.mark.long),
    pytest.param(lambda seed: make_mixture("deepseek_v3", seed), {}, 0.75, id="mla", marks=pytest.mark.long),
    pytest.param(lambda seed: make_model("qwen2", True, seed), {}, 0.6, id="tied", marks=pytest.mark.long),
    pytest.param(lambda seed: make_model("llama", False, seed), {}, 0.6, id="untied", marks=pytest.mark.long),
    pytest.param(lambda seed: make_model("qwen3", True, seed), {}, 0.6, id="qwen3", marks=pytest.mark.long),
    pytest.param(
        lambda seed: make_mixture("qwen3_moe", seed),
        {"tensor_parallel_size": 1, "expert_parallel_size": 2},
        0.9,
        id="replicas",
        marks=pytest.mark.long,
    ),
    pytest.param(
        lambda seed: make_model("qwen2", False, seed),
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
        0.6,
        id="stages",
        marks=pytest.mark.long,
    ),
    pytest.param(
        lambda seed: make_mixture("deepseek_v3", seed),
        {"backend": "megatron", "expert_parallel_size": 2},
        0.75,
        id="megatron",
        marks=[pytest.mark.long, pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="no mcore")],
    ),
]


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    thread = EventLoopThread()
    yield thread
    thread.close()


@pytest.fixture
def engines(request: pytest.FixtureRequest, tmp_path: Path, local_ray: Path) -> Iterator[EngineGroup]:
    make, sizes = request.param
    save_model(tmp_path, make(0))
    cluster = ClusterConfig(device="cpu", gpus_per_node=0, max_actor_restarts=1)
    where = RayVirtualCluster([2], use_gpus=False, cpus_per_bundle=0.5)
    values = {"backend": "vllm", "tensor_parallel_size": 2, "load_weights": True} | sizes
    group = make_engines(make_settings(tmp_path, **values), where, cluster)
    yield group
    group.shutdown()
    where.shutdown()


def answers(engines: EngineGroup, loop: EventLoopThread) -> list[list[int]]:
    async def one(prompt: list[int]) -> GenerationResult:
        return await engines.generate(ask(prompt, temperature=0.0))

    return [loop.run(one(prompt), 60, "an answer").token_ids.tolist() for prompt in PROMPTS]


def size_of(model: PreTrainedModel) -> int:
    tensors = {tensor.data_ptr(): tensor for tensor in model.state_dict().values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@pytest.mark.parametrize(
    ("engines", "make", "most"),
    [pytest.param((c.values[0], c.values[1]), c.values[0], c.values[2], id=c.id, marks=c.marks) for c in CASES],
    indirect=["engines"],
)
def test_each_rank_receives_about_its_share_and_answers_like_hugging_face(
    engines: EngineGroup,
    make: Callable[[int], PreTrainedModel],
    most: float,
    loop: EventLoopThread,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received: list[list[int]] = []

    def check(answered: list[SyncReceipt], buckets: list[Bucket], version: int) -> None:
        received.append([receipt.num_bytes for receipt in answered])
        check_receipts(answered, buckets, version)

    monkeypatch.setattr(refit, "check_receipts", check)
    policy = LocalPolicy(make(1))
    spec = TransportSpec("collective", run_id="parts", bucket_size_bytes=50_000, timeout_s=60.0)
    refitter = Refitter(policy, engines, spec, 60.0)
    for seed in (1, 2):
        policy.model, policy.weight_version = make(seed), seed
        refitter.ensure_fresh()
        assert answers(engines, loop) == [greedy_reference(make(seed), prompt, 12) for prompt in PROMPTS]
    whole, *of_parts = received
    size = size_of(make(1))
    assert len(whole) == 2
    assert min(whole) >= size
    assert [len(of_lane) for of_lane in of_parts] == [1, 1, 1, 1], "two lanes on trial, and two of the next version"
    assert all(num_bytes <= most * size for of_lane in of_parts for num_bytes in of_lane)
    assert sum(of_lane[0] for of_lane in of_parts[:2]) >= size


@pytest.mark.long
@pytest.mark.parametrize(
    "engines", [(lambda seed: make_mixture("qwen3_moe", seed), {"expert_parallel_size": 2})], indirect=True
)
def test_a_part_that_is_missing_is_noticed_on_trial(
    engines: EngineGroup, loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_a_row(self, reads):
        for parts in reads:
            name = "model.layers.1.self_attn.o_proj.weight"
            (part,) = parts[name]
            parts[name] = (type(part)(part.starts, (part.shape[0] - 1, *part.shape[1:])),)
        return learn(self, reads)

    learn = refit.LaneChoice.learn
    monkeypatch.setattr(refit.LaneChoice, "learn", without_a_row)
    policy = LocalPolicy(make_mixture("qwen3_moe", 1))
    refitter = Refitter(policy, engines, TransportSpec("collective", run_id="parts", timeout_s=60.0), 60.0)
    with caplog.at_level(logging.WARNING):
        refitter.ensure_fresh()
    assert "Weights are sent whole" in caplog.text
    expected = [greedy_reference(make_mixture("qwen3_moe", 1), prompt, 12) for prompt in PROMPTS]
    assert answers(engines, loop) == expected
    assert refitter.last_sync["sync_mb"] * 1e6 >= size_of(policy.model)


@pytest.mark.parametrize("engines", [(lambda seed: make_model("qwen2", True, seed), {})], indirect=True)
def test_parts_that_cannot_be_tried_are_not_sent(
    engines: EngineGroup, loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two empty lists of hidden states are equal, which says nothing about the weights."""
    call_all = engines.call_all
    asked: list[str] = []

    def without_outputs(method: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(method)
        if method == "layer_outputs":  # of which nothing is found either, as all weights are finite
            return call_all("weights_not_finite")
        return call_all(method, *args, **kwargs)

    monkeypatch.setattr(engines, "call_all", without_outputs)
    policy = LocalPolicy(make_model("qwen2", True, 1))
    refitter = Refitter(policy, engines, TransportSpec("collective", run_id="parts", timeout_s=60.0), 60.0)
    with caplog.at_level(logging.WARNING):
        refitter.ensure_fresh()
    assert "do not report what their layers compute" in caplog.text
    assert asked.count("begin_weight_update") == 1, "the whole tensors of the first sync stay"
    expected = [greedy_reference(make_model("qwen2", True, 1), prompt, 12) for prompt in PROMPTS]
    assert answers(engines, loop) == expected
