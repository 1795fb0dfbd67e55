"""The worker processes of one engine on the CPU, called together as the controller does."""

import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine_process import EngineProcess
from generation_helpers import PROMPTS, ask, greedy_reference, make_settings, reference_logprobs
from transformers import PreTrainedModel

from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.models.huggingface.layers import decoder_layers, recorded_outputs
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.lanes import Lane
from nemo_rl.weight_sync.parts import WholeWeights
from nemo_rl.weight_sync.transport import SharedBuffer, TransportSpec, allocate, map_memory
from nemo_rl.weight_sync.verify import SyncReceipt

SPEC = TransportSpec("shared_memory", run_id="test", bucket_size_bytes=50_000)


class EngineOfRanks:
    """The processes of one engine.

    `machines` has the machine of each; `sizes` are settings.
    """

    def __init__(self, folder: Path, stack: ExitStack, machines: tuple[int, ...], backend: str = "vllm", **sizes: int):
        settings = {"engine": make_settings(folder, backend, load_weights=True, **sizes)}
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
        self.ranks = [
            stack.enter_context(EngineProcess(settings, rank, port, machine)) for rank, machine in enumerate(machines)
        ]
        self.sender = WeightSender([Lane(SPEC)], rank=0, is_node_leader=True)
        stack.callback(self.sender.close)
        self.call("ready")

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.call_each(method, [args] * len(self.ranks))

    def call_each(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        for rank, own in zip(self.ranks, arguments, strict=True):
            rank.start("engine", method, *own)
        return [rank.answer(method) for rank in self.ranks]

    def greedy(self) -> list[list[int]]:
        requests = [ask(prompt, temperature=0.0) for prompt in PROMPTS]
        return [result.token_ids.tolist() for result in self.ranks[0].generate("engine", requests)]

    def check_abort(self) -> None:
        first = self.ranks[0]
        first.call("engine", "submit", [("long", ask(PROMPTS[0], max_new_tokens=200))])
        first.call("engine", "abort", ["long"])
        ((name, result),) = first.call("engine", "collect").results
        assert (name, result.finish_reason) == ("long", "abort") and len(result.token_ids) < 200

    def sync(
        self, tensors: dict[str, torch.Tensor], version: int, damaged: bool = False
    ) -> tuple[list[Bucket], list[SyncReceipt]]:
        """Run one sync; `damaged` lets rank 1 find a flipped bit in the first bucket."""
        self.call("begin_weight_update", SPEC, version)
        self.sender.begin(WholeWeights(tensors.items))
        buckets: list[Bucket] = []
        while not buckets or not buckets[-1].is_last:
            buckets.append(self.sender.next_buckets()[0])
            of_rank_1, copy = buckets[-1], None
            if damaged and len(buckets) == 1:
                of_rank_1, copy = with_flipped_bit(buckets[-1])
            others = [(buckets[-1],)] * (len(self.ranks) - 2)
            self.call_each("receive_bucket", [(buckets[-1],), (of_rank_1,), *others])
            if copy is not None:
                copy.close()
        return buckets, self.call("finish_weight_update", version)


def greedy_references(model: PreTrainedModel) -> list[list[int]]:
    return [greedy_reference(model, prompt, 12) for prompt in PROMPTS]


def check_draws(engine: EngineOfRanks, model: PreTrainedModel) -> None:
    sampling = {"temperature": 0.7, "top_k": 20}
    (result,) = engine.ranks[0].generate("engine", [ask(PROMPTS[1], seed=3, **sampling)])
    reference = reference_logprobs(model, PROMPTS[1], result.token_ids.tolist(), SamplingParams(**sampling))
    torch.testing.assert_close(torch.tensor(result.logprobs), torch.tensor(reference), atol=1e-4, rtol=0)


def check_layers(engine: EngineOfRanks, model: PreTrainedModel) -> None:
    """Compare the first rank's hidden states with Hugging Face's; the others return none."""
    of_first, *of_others = engine.call("layer_outputs", PROMPTS[1])
    assert of_others == [[]] * len(of_others)
    with torch.no_grad(), recorded_outputs(decoder_layers(model)) as outputs:
        model(torch.tensor([PROMPTS[1]]), use_cache=False)
    for found, right in zip(of_first, outputs, strict=True):
        torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


def with_flipped_bit(bucket: Bucket) -> tuple[Bucket, SharedBuffer]:
    """Return a bucket whose first byte differs from that of another one."""
    ((host, handle),) = bucket.handles.items()
    copy = allocate(handle.num_bytes)
    copy.flat.copy_(map_memory(handle))
    copy.flat[0] ^= 1
    return replace(bucket, handles={host: copy.handle}), copy
