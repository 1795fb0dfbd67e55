"""One vLLM engine whose experts are divided over two replicas of the other layers, each on a machine of its own."""

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from engine_of_ranks import EngineOfRanks
from generation_helpers import PROMPTS, ask, greedy_reference, make_mixture, save_model, streamed
from transformers import PreTrainedModel

from nemo_rl.models.huggingface.layers import decoder_layers, recorded_outputs
from nemo_rl.weight_sync.verify import check_receipts

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineOfRanks]:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, make_mixture("qwen3_moe", seed=0))
    with ExitStack() as stack:
        yield EngineOfRanks(folder, stack, (0, 1), expert_parallel_size=2)


def expected(model: PreTrainedModel) -> list[list[int]]:
    return [greedy_reference(model, prompt, 12) for prompt in PROMPTS]


def test_replicas_answer_like_one_model_after_each_sync(engine: EngineOfRanks) -> None:
    """Five requests are more than one replica gets; one request leaves the other replica without any."""
    assert engine.greedy() == expected(make_mixture("qwen3_moe", seed=0))
    model = make_mixture("qwen3_moe", seed=1)
    buckets, receipts = engine.sync(streamed(model), 1)
    check_receipts(receipts, buckets, 1)
    assert engine.greedy() == expected(model)
    (alone,) = engine.ranks[0].generate("engine", [ask(PROMPTS[1], temperature=0.0)])
    assert alone.token_ids.tolist() == expected(model)[1]
    of_first, of_second = engine.call("layer_outputs", PROMPTS[1])
    with torch.no_grad(), recorded_outputs(decoder_layers(model)) as outputs:
        model(torch.tensor([PROMPTS[1]]), use_cache=False)
    assert of_second == [] and len(of_first) == len(outputs)
    for found, right in zip(of_first, outputs, strict=True):
        torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


def test_a_refused_request_and_an_aborted_one_leave_the_replicas_in_step(engine: EngineOfRanks) -> None:
    first = engine.ranks[0]
    long = [(name, ask(PROMPTS[0], max_new_tokens=200)) for name in ("one", "two")]
    first.call("engine", "submit", [*long, ("too long", ask([1] * 300))])
    (refused,) = first.call("engine", "collect").results
    assert refused[0] == "too long" and "leaves no room" in str(refused[1].error)
    first.call("engine", "abort", ["two"])
    ((name, result),) = first.call("engine", "collect").results
    assert (name, result.finish_reason) == ("two", "abort") and len(result.token_ids) < 200
    ((name, result),) = first.call("engine", "collect").results
    assert (name, result.finish_reason, len(result.token_ids)) == ("one", "length", 200)


def test_missing_tensors_are_named_with_their_worker(engine: EngineOfRanks) -> None:
    tensors = streamed(make_mixture("qwen3_moe", seed=2))
    _, receipts = engine.sync({name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}, 2)
    assert receipts[0].unbound == ["model.norm.weight", "model.norm.weight of worker 1"]


def test_the_death_of_a_replica_ends_the_other(engine: EngineOfRanks) -> None:
    """This is the last test of the module: the engine is gone afterwards."""
    engine.ranks[1].kill()
    engine.ranks[0].start("engine", "submit", [("next", ask(PROMPTS[0]))])
    assert engine.ranks[0].wait_until_gone(20)
