"""One vLLM engine of two tensor-parallel ranks on the CPU, each in a separate process as in a run, and on two machines.

Greedy text equals Hugging Face, both ranks receive and confirm weights, and no process and no shared memory remains
after one of them is killed.
"""

import importlib.util
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from engine_of_ranks import EngineOfRanks, check_draws, check_layers, greedy_references
from generation_helpers import (
    PROMPTS,
    ask,
    make_model,
    save_model,
    streamed,
)
from vllm_looks import named_shared_memory

from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.verify import check_receipts

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]


@pytest.fixture(scope="module", params=[(0, 0), (0, 1)], ids=["one machine", "two machines"])
def engine(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[EngineOfRanks]:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, make_model("qwen2", True, seed=0))
    with ExitStack() as stack:
        yield EngineOfRanks(folder, stack, request.param, tensor_parallel_size=2)


def test_greedy_answers_match_hugging_face_after_each_sync(engine: EngineOfRanks) -> None:
    assert engine.greedy() == greedy_references(make_model("qwen2", True, seed=0))
    for version in (1, 2):
        model = make_model("qwen2", True, seed=version)
        buckets, receipts = engine.sync(streamed(model), version)
        check_receipts(receipts, buckets, version)
        assert [receipt.receiver.partition(" on ")[0] for receipt in receipts] == [
            "engine 0, worker 0",
            "engine 0, worker 1",
        ]
        assert engine.greedy() == greedy_references(model)
    check_draws(engine, model)
    check_layers(engine, model)


def test_a_failure_on_the_second_rank_names_that_rank(engine: EngineOfRanks) -> None:
    tensors = streamed(make_model("qwen2", True, seed=3))
    buckets, receipts = engine.sync(tensors, 3, damaged=True)
    first = next(iter(tensors))
    with pytest.raises(WeightSyncError) as caught:
        check_receipts(receipts, buckets, 3)
    assert f"engine 0, worker 1 on {socket.gethostname()}: content differs in {first}" in str(caught.value)
    assert "worker 0 on" not in str(caught.value)
    without = {name: tensor for name, tensor in tensors.items() if "k_proj.bias" not in name and "norm" not in name}
    buckets, receipts = engine.sync(without, 4)
    unbound = receipts[0].unbound
    assert {"model.norm.weight", "model.norm.weight of worker 1"} <= set(unbound)
    assert {
        "part of model.layers.0.self_attn.qkv_proj",
        "part of model.layers.0.self_attn.qkv_proj of worker 1",
    } <= set(unbound)


def test_a_running_request_can_be_aborted(engine: EngineOfRanks) -> None:
    engine.check_abort()


def test_the_death_of_one_rank_ends_all_and_leaves_no_process(engine: EngineOfRanks) -> None:
    """This is the last test of the module: the engine is gone afterwards."""
    assert [rank.look("engine", named_shared_memory) for rank in engine.ranks] == [[], []]
    engine.ranks[1].kill()
    engine.ranks[0].start("engine", "submit", [("next", ask(PROMPTS[0]))])
    assert engine.ranks[0].wait_until_gone(20)
