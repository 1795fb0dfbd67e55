"""One vLLM engine of two tensor-parallel ranks on the CPU, each in a separate process as in a run.

Greedy text equals Hugging Face, both ranks receive and confirm weights, and no process and no shared memory remains
after one of them is killed.
"""

import importlib.util
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_process import EngineProcess
from generation_helpers import (
    PROMPTS,
    ask,
    greedy_reference,
    make_model,
    make_settings,
    reference_logprobs,
    save_model,
    streamed,
)
from transformers import PreTrainedModel
from vllm_looks import named_shared_memory

from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.models.huggingface.layers import decoder_layers, recorded_outputs
from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.lanes import Lane
from nemo_rl.weight_sync.shared_memory import SharedBuffer, allocate, map_memory
from nemo_rl.weight_sync.transport import TransportSpec
from nemo_rl.weight_sync.verify import SyncReceipt, check_receipts

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]

SPEC = TransportSpec("shared_memory", run_id="test", bucket_size_bytes=50_000)
NUM_RANKS = 2


class EngineOfRanks:
    """The processes of one engine, called together as the controller does."""

    def __init__(self, folder: Path, stack: ExitStack):
        settings = {"engine": make_settings(folder, "vllm", load_weights=True, tensor_parallel_size=NUM_RANKS)}
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
        self.ranks = [stack.enter_context(EngineProcess(settings, rank, port)) for rank in range(NUM_RANKS)]
        self.sender = WeightSender([Lane(SPEC)], rank=0, is_node_leader=True)
        stack.callback(self.sender.close)
        self.call("ready")

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.call_each(method, [args] * NUM_RANKS)

    def call_each(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        for rank, own in zip(self.ranks, arguments, strict=True):
            rank.start("engine", method, *own)
        return [rank.answer(method) for rank in self.ranks]

    def greedy(self) -> list[list[int]]:
        requests = [ask(prompt, temperature=0.0) for prompt in PROMPTS]
        return [result.token_ids.tolist() for result in self.ranks[0].generate("engine", requests)]

    def sync(
        self, tensors: dict[str, torch.Tensor], version: int, damaged: bool = False
    ) -> tuple[list[Bucket], list[SyncReceipt]]:
        """Run one sync; `damaged` lets rank 1 find a flipped bit in the first bucket."""
        self.call("begin_weight_update", SPEC, version)
        self.sender.begin(tensors.items())
        buckets: list[Bucket] = []
        while not buckets or not buckets[-1].is_last:
            buckets.append(self.sender.next_buckets()[0])
            of_rank_1, copy = buckets[-1], None
            if damaged and len(buckets) == 1:
                of_rank_1, copy = with_flipped_bit(buckets[-1])
            self.call_each("receive_bucket", [(buckets[-1],), (of_rank_1,)])
            if copy is not None:
                copy.close()
        return buckets, self.call("finish_weight_update", version)


def with_flipped_bit(bucket: Bucket) -> tuple[Bucket, SharedBuffer]:
    """Return a bucket whose first byte differs from that of another one."""
    ((host, handle),) = bucket.handles.items()
    copy = allocate(handle.num_bytes)
    copy.flat.copy_(map_memory(handle))
    copy.flat[0] ^= 1
    return replace(bucket, handles={host: copy.handle}), copy


def expected(model: PreTrainedModel) -> list[list[int]]:
    return [greedy_reference(model, prompt, 12) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineOfRanks]:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, make_model("qwen2", True, seed=0))
    with ExitStack() as stack:
        yield EngineOfRanks(folder, stack)


def test_greedy_answers_match_hugging_face_after_each_sync(engine: EngineOfRanks) -> None:
    assert engine.greedy() == expected(make_model("qwen2", True, seed=0))
    for version in (1, 2):
        model = make_model("qwen2", True, seed=version)
        buckets, receipts = engine.sync(streamed(model), version)
        check_receipts(receipts, buckets, version)
        assert [receipt.receiver.partition(" on ")[0] for receipt in receipts] == [
            "engine 0, worker 0",
            "engine 0, worker 1",
        ]
        assert engine.greedy() == expected(model)
    sampling = {"temperature": 0.7, "top_k": 20}
    (result,) = engine.ranks[0].generate("engine", [ask(PROMPTS[1], seed=3, **sampling)])
    reference = reference_logprobs(model, PROMPTS[1], result.token_ids.tolist(), SamplingParams(**sampling))
    torch.testing.assert_close(torch.tensor(result.logprobs), torch.tensor(reference), atol=1e-4, rtol=0)
    of_first, of_second = engine.call("layer_outputs", PROMPTS[1])
    assert of_second == []
    with torch.no_grad(), recorded_outputs(decoder_layers(model)) as outputs:
        model(torch.tensor([PROMPTS[1]]), use_cache=False)
    for found, right in zip(of_first, outputs, strict=True):
        torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


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
    first = engine.ranks[0]
    first.call("engine", "submit", [("long", ask(PROMPTS[0], max_new_tokens=200))])
    first.call("engine", "abort", ["long"])
    ((name, result),) = first.call("engine", "collect").results
    assert (name, result.finish_reason) == ("long", "abort") and len(result.token_ids) < 200


def test_the_death_of_one_rank_ends_all_and_leaves_no_process(engine: EngineOfRanks) -> None:
    """This is the last test of the module: the engine is gone afterwards."""
    assert [rank.look("engine", named_shared_memory) for rank in engine.ranks] == [[], []]
    engine.ranks[1].kill()
    engine.ranks[0].start("engine", "submit", [("next", ask(PROMPTS[0]))])
    assert engine.ranks[0].wait_until_gone(20)
