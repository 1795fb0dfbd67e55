"""Adapters in engines: whose model draws a response, what rows share, and what an engine refuses."""

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
from generation_helpers import PROMPTS, ask, greedy_reference, make_model, make_settings, save_model

from nemo_rl.models.adapters.files import BaseModel, write_adapter_folder
from nemo_rl.models.adapters.slots import linear_names
from nemo_rl.models.adapters.tensors import AdapterShape, AdapterTensors, new_adapter
from nemo_rl.models.generation.continuous import Cost, TokenCache
from nemo_rl.models.generation.hf import ContinuousHfEngine, HfEngine
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult
from nemo_rl.utils.errors import GenerationError

ENGINES = {"batched": HfEngine, "continuous": ContinuousHfEngine}
NAMES = ["a", "b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, make_model("qwen2", True, seed=1))
    return folder


@pytest.fixture(scope="module")
def adapters() -> dict[str, AdapterTensors]:
    """Two adapters of different rank and layers, both of which change every response."""
    model = make_model("qwen2", True, seed=1)
    sizes = {name: tuple(model.get_submodule(name).weight.shape) for name in [*linear_names(model), "lm_head"]}
    made = {}
    for seed, name in enumerate(NAMES):
        shape = AdapterShape(rank=2 + seed, alpha=8.0, train_mlp=seed == 0)
        empty = new_adapter(shape, sizes, "lm_head", torch.device("cpu"))
        generator = torch.Generator().manual_seed(seed)
        drawn = {key: torch.randn(t.shape, generator=generator) * 0.2 for key, t in empty.parameters().items()}
        made[name] = empty.with_parameters(drawn)
    return made


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, folder, adapters):
    made = ENGINES[request.param](make_settings(folder, "hf", holds_adapters=True))
    for name, adapter in adapters.items():
        made.add_adapter(name, adapter)
    return made


NUMBERS = itertools.count()


def run(engine, requests: list[GenerationRequest]) -> list[GenerationResult]:
    """Answer requests with ids that no earlier request had, as a group of engines does."""

    async def answers() -> list[GenerationResult]:
        return await asyncio.gather(*(engine.generate(f"row {next(NUMBERS)}", request) for request in requests))

    return asyncio.run(answers())


def greedy(prompt: list[int], adapter: str | None) -> GenerationRequest:
    return replace(ask(prompt, temperature=0.0, max_new_tokens=8), adapter=adapter)


def test_each_request_gets_its_adapter(engine, folder, adapters, tmp_path):
    """All requests arrive together; the reference is PEFT's model, one prompt at a time."""
    requests = [greedy(prompt, adapter) for prompt in PROMPTS[:3] for adapter in ("a", None, "b")]
    results = run(engine, requests)
    models = {None: make_model("qwen2", True, seed=1)}
    for name, adapter in adapters.items():
        write_adapter_folder(tmp_path / name, adapter, BaseModel(str(folder), fuses_experts=False))
        models[name] = peft.PeftModel.from_pretrained(make_model("qwen2", True, seed=1), tmp_path / name).eval()
    texts = set()
    for request, result in zip(requests, results, strict=True):
        wanted = greedy_reference(models[request.adapter], request.prompt_token_ids, 8)
        assert result.token_ids.tolist() == wanted, request.adapter
        texts.add((request.adapter, *wanted))
    assert len(texts) == len(requests)


@pytest.mark.parametrize("kind", ENGINES.values(), ids=ENGINES)
def test_requests_of_the_base_are_those_without_adapters(kind, folder, adapters):
    """The keys and values of another adapter's rows are not used, and the slots do not change a bit."""
    plain, own = (kind(make_settings(folder, "hf", holds_adapters=holds)) for holds in (False, True))
    requests = [ask(prompt, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    own.add_adapter("a", adapters["a"])
    run(own, [greedy(prompt, "a") for prompt in PROMPTS])
    for ours, theirs in zip(run(own, requests), run(plain, requests), strict=True):
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)


def test_unknown_and_dropped_adapters_are_refused(engine, adapters):
    engine.add_adapter("c", adapters["a"])
    before = run(engine, [greedy(PROMPTS[0], "c")])[0]
    engine.drop_adapter("c")
    with pytest.raises(GenerationError, match="has no adapter 'c'"):
        run(engine, [greedy(PROMPTS[0], "c")])
    again = run(engine, [greedy(PROMPTS[0], "a")])[0]
    np.testing.assert_array_equal(before.token_ids, again.token_ids)


def test_a_running_request_keeps_an_adapter_that_is_dropped(engine, adapters):
    engine.add_adapter("d", adapters["b"])

    async def drop_meanwhile() -> GenerationResult:
        answer = asyncio.ensure_future(engine.generate("1", greedy(PROMPTS[0], "d")))
        await asyncio.sleep(0)
        engine.drop_adapter("d")
        return await answer

    result = asyncio.run(drop_meanwhile())
    np.testing.assert_array_equal(result.token_ids, run(engine, [greedy(PROMPTS[0], "b")])[0].token_ids)


def test_an_adapter_that_overflows_fails_its_own_requests_only(engine, adapters):
    wild = {name: value * 1e30 for name, value in adapters["a"].parameters().items()}
    engine.add_adapter("wild", adapters["a"].with_parameters(wild))
    others = [greedy(PROMPTS[0], "a"), greedy(PROMPTS[1], None)]
    alone = run(engine, others)

    async def together() -> list[GenerationResult | BaseException]:
        requests = [others[0], greedy(PROMPTS[0], "wild"), others[1]]
        answers = [engine.generate(f"together {number}", request) for number, request in enumerate(requests)]
        return await asyncio.gather(*answers, return_exceptions=True)

    first, failed, last = asyncio.run(together())
    assert isinstance(failed, GenerationError) and "'wild' are not finite" in str(failed)
    for ours, theirs in zip((first, last), alone, strict=True):
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)


def test_rows_share_keys_and_values_with_rows_of_their_adapter_only():
    cache = TokenCache(12, torch.device("cpu"))
    cache.enter("row", [1, 2, 3, 4], "a")
    assert cache.cost([1, 2, 3, 5], "a") == Cost(num_new=1, room=1)
    assert cache.cost([1, 2, 3, 5], "b") == cache.cost([1, 2, 3, 5]) == Cost(num_new=4, room=4)
    assert cache.enter("other", [1, 2, 3, 5], "b") == 0
