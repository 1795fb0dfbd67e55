"""Engines that get the adapter only: what they compute, what they refuse, and what a replaced engine gets."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from generation_helpers import (
    PROMPTS,
    answered,
    ask,
    check_spans,
    greedy_reference,
    load_weights,
    make_mixture,
    make_model,
    make_settings,
    reference_logprobs,
    save_model,
)
from local_policy import LocalPolicy
from test_refit import answers, kill
from torch import Tensor, nn
from transformers import PreTrainedModel

from nemo_rl.algorithms.rollout.refit import Refitter
from nemo_rl.config import ClusterConfig, LoraConfig
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.models.adapters.slots import linear_names
from nemo_rl.models.generation.factory import make_engines
from nemo_rl.models.generation.hf import ContinuousHfEngine, HfEngine
from nemo_rl.utils.errors import GenerationError
from nemo_rl.weight_sync.transport import TransportSpec

LORA = LoraConfig.build(enabled=True, dim=4, alpha=8, dropout=0.5)
ENGINES = {"batched": HfEngine, "continuous": ContinuousHfEngine}


def drawn(model: PreTrainedModel, seed: int) -> dict[str, Tensor]:
    """Return a random adapter of all linear layers, as a trainer sends it."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in linear_names(model):
        rows, columns = model.get_submodule(name).weight.shape
        found[f"{name}.lora_A"] = torch.randn(LORA.dim, columns, generator=generator) * 0.2
        found[f"{name}.lora_B"] = torch.randn(rows, LORA.dim, generator=generator) * 0.2
    return found


@torch.no_grad()
def merged(model: PreTrainedModel, adapter: dict[str, Tensor]) -> PreTrainedModel:
    """Add an adapter to the weights of a plain model: W + (alpha / dim) B A, in float64."""
    for name in linear_names(model):
        weight = model.get_submodule(name).weight
        product = adapter[f"{name}.lora_B"].double() @ adapter[f"{name}.lora_A"].double()
        weight.copy_(weight.double() + LORA.alpha / LORA.dim * product)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    save_model(folder, make_model("qwen2", True, seed=1))
    return folder


@pytest.mark.parametrize("kind", ENGINES)
def test_an_engine_computes_with_the_adapter_of_the_last_sync(kind: str, folder: Path) -> None:
    engine = ENGINES[kind](make_settings(folder, "hf", lora=LORA))
    before = {name: value.clone() for name, value in engine._model.state_dict().items() if "lora" not in name}
    texts = set()
    for version in (1, 2):
        adapter = drawn(make_model("qwen2", True, seed=1), version)
        model = merged(make_model("qwen2", True, seed=1), adapter)
        assert asyncio.run(load_weights(engine, adapter.items(), version)) == []
        requests = [ask(prompt, temperature=temperature) for prompt in PROMPTS for temperature in (0.0, 1.0)]
        for request, result in zip(requests, asyncio.run(answered(engine, requests)), strict=True):
            tokens = result.token_ids.tolist()
            if not request.sampling.temperature:
                assert tokens == greedy_reference(model, request.prompt_token_ids, len(tokens))
                texts.add((version, *tokens))
            expected = reference_logprobs(model, request.prompt_token_ids, tokens, request.sampling)
            assert result.logprobs.tolist() == pytest.approx(expected, abs=2e-4)
            assert [span.version for span in result.weight_versions] == [version]
    assert len({tokens for _, *rest in texts for tokens in [tuple(rest)]}) == 2 * len(PROMPTS)
    assert all(torch.equal(engine._model.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("kind", ENGINES)
def test_a_running_response_goes_on_with_the_new_adapter(kind: str, folder: Path) -> None:
    engine = ENGINES[kind](make_settings(folder, "hf", lora=LORA))
    adapters = {version: drawn(make_model("qwen2", True, seed=1), version) for version in (1, 2)}
    models = {version: merged(make_model("qwen2", True, seed=1), adapter) for version, adapter in adapters.items()}
    request = ask(PROMPTS[1], temperature=0.0, max_new_tokens=40)

    async def interrupted():
        await load_weights(engine, adapters[1].items(), 1)
        answer = engine.generate("row", request)
        while engine.num_tokens("row") < 5:
            await asyncio.sleep(0)
        await load_weights(engine, adapters[2].items(), 2)
        return await answer

    result = asyncio.run(interrupted())
    (_, first), (start, second) = result.weight_versions
    assert (first, second) == (1, 2) and 5 <= start < 40
    check_spans(request, result, models, result.weight_versions)


def test_what_did_not_arrive_is_named_and_what_does_not_belong_is_refused(folder: Path) -> None:
    engine = HfEngine(make_settings(folder, "hf", lora=LORA))
    adapter = drawn(make_model("qwen2", True, seed=1), 1)
    missing = "model.layers.1.mlp.up_proj.lora_B"
    rest = [(name, value) for name, value in adapter.items() if name != missing]
    assert asyncio.run(load_weights(engine, rest, 1)) == [missing]
    assert asyncio.run(load_weights(engine, adapter.items(), 2)) == []
    with pytest.raises(GenerationError, match=r"no tensor named model\.layers\.7\.lora_A"):
        asyncio.run(load_weights(engine, [("model.layers.7.lora_A", torch.zeros(4, 4))], 3))
    spoilt = adapter | {missing: torch.full_like(adapter[missing], torch.nan)}
    asyncio.run(load_weights(engine, spoilt.items(), 4))
    assert engine.weights_not_finite() == [missing]


def test_a_mixture_whose_experts_are_fused_gets_its_adapter(tmp_path: Path) -> None:
    save_model(tmp_path, make_mixture("qwen3_moe", seed=1))
    engine = HfEngine(make_settings(tmp_path, "hf", lora=LORA))
    adapter = drawn(make_mixture("qwen3_moe", seed=1), 1)
    assert asyncio.run(load_weights(engine, adapter.items(), 1)) == []
    model = merged(make_mixture("qwen3_moe", seed=1), adapter)
    (result,) = asyncio.run(answered(engine, [ask(PROMPTS[1], temperature=0.0)]))
    tokens = result.token_ids.tolist()
    assert tokens == greedy_reference(model, PROMPTS[1], len(tokens))


class SentAdapter(nn.Module):
    """An adapter in the place of the model that `LocalPolicy` streams."""

    def __init__(self, adapter: dict[str, Tensor]) -> None:
        super().__init__()
        self.adapter = adapter

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        return self.adapter


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    thread = EventLoopThread()
    yield thread
    thread.close()


@pytest.mark.ray
def test_a_replaced_engine_gets_the_adapter_again(folder: Path, local_ray: Path, loop: EventLoopThread) -> None:
    cluster = ClusterConfig(device="cpu", gpus_per_node=0, max_actor_restarts=2)
    where = RayVirtualCluster([2], use_gpus=False, cpus_per_bundle=0.5)
    settings = make_settings(folder, "hf", lora=LORA, env_vars={"OMP_NUM_THREADS": "1"})
    engines = make_engines(settings, where, cluster)
    adapter = drawn(make_model("qwen2", True, seed=1), 1)
    model = merged(make_model("qwen2", True, seed=1), adapter)
    expected = [greedy_reference(model, prompt, 12) for prompt in PROMPTS]
    try:
        refitter = Refitter(
            LocalPolicy(SentAdapter(adapter)),
            engines,
            TransportSpec("shared_memory", run_id="test"),
            60.0,
        )
        refitter.ensure_fresh()
        assert answers(engines, loop) == expected
        assert refitter.last_sync["num_tensors"] == len(adapter)
        kill(engines, 1)
        refitter.sync()
        assert engines.num_restarts == 1
        assert answers(engines, loop) == expected
    finally:
        engines.shutdown()
        where.shutdown()
