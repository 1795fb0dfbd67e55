"""Adapters in vLLM: whose model draws a response, what tenants share, and what a weight sync of adapters changes."""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_looks import (
    add,
    answer_after_drop,
    bytes_of_slots,
    drop,
    held_in_worker,
    interrupted,
    refusal_of,
    refusal_of_add,
    rows_of_wrappers,
)
from engine_process import EngineProcess
from generation_helpers import (
    PROMPTS,
    ask,
    check_spans,
    greedy_reference,
    make_model,
    make_settings,
    reference_logprobs,
    save_model,
)
from test_lora_refit import LORA, drawn, merged
from torch import Tensor
from transformers import PreTrainedModel

from nemo_rl.models.adapters.slots import slot_names
from nemo_rl.models.adapters.tensors import AdapterShape, AdapterTensors, new_adapter
from nemo_rl.models.generation.factory import adapter_slot_bytes
from nemo_rl.models.generation.interfaces import GenerationRequest, Grammar
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.lanes import Lane
from nemo_rl.weight_sync.parts import WholeWeights
from nemo_rl.weight_sync.transport import TransportSpec

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]

SPEC = TransportSpec("shared_memory", run_id="test", bucket_size_bytes=10_000)
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "tied": lambda: make_model("qwen2", True, seed=1),
    "untied": lambda: make_model("llama", False, seed=1),
}
SHAPES = {
    "a": AdapterShape(rank=2, alpha=8.0),
    "b": AdapterShape(rank=3, alpha=8.0, train_mlp=False),
    "c": AdapterShape(rank=9, alpha=4.0, train_unembed=False),
}
SLOTS = {"max_loras": 2}


def adapter_of(model: PreTrainedModel, shape: AdapterShape, seed: int) -> AdapterTensors:
    """Draw an adapter that changes every response."""
    names = slot_names(model)
    sizes = {name: tuple(model.get_submodule(name).weight.shape) for name in names}
    empty = new_adapter(shape, sizes, "lm_head", torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    drawn_ = {key: torch.randn(t.shape, generator=generator) * 0.2 for key, t in empty.parameters().items()}
    return empty.with_parameters(drawn_)


@torch.no_grad()
def merged_with(model: PreTrainedModel, adapter: AdapterTensors) -> PreTrainedModel:
    """Add an adapter to the weights, in float64. A head that shares its weight gets one of its own."""
    for name, pair in adapter.pairs.items():
        layer = model.get_submodule(name)
        weight = layer.weight.double() + pair.scaling * pair.b.double() @ pair.a.double()
        layer.weight = torch.nn.Parameter(weight.float())
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, make in MODELS.items():
        made[name] = tmp_path_factory.mktemp("model")
        save_model(made[name], make())
    return made


@pytest.fixture(scope="module")
def engines(folders: dict[str, Path]) -> Iterator[EngineProcess]:
    """Engines in one process: of each model with named adapters in two slots, without, and with one that is sent."""
    settings = {}
    for name, folder in folders.items():
        settings[name] = make_settings(folder, "vllm", load_weights=True, holds_adapters=True, engine_kwargs=SLOTS)
        settings[f"{name} sent"] = make_settings(folder, "vllm", load_weights=True, lora=LORA)
    settings["plain"] = make_settings(folders["tied"], "vllm", load_weights=True)
    settings["salted"] = make_settings(folders["tied"], "vllm", load_weights=True, lora=LORA, recomputes_cache=False)
    with EngineProcess(settings) as process:
        yield process


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, engines: EngineProcess) -> tuple[str, EngineProcess]:
    """An engine that holds the adapters a, b and c."""
    for seed, (name, shape) in enumerate(SHAPES.items()):
        adapter = adapter_of(MODELS[request.param](), shape, seed)
        engines.look(request.param, add, name, adapter)
    return request.param, engines


def with_adapter(prompt: list[int], adapter: str | None, **sampling: float) -> GenerationRequest:
    return replace(ask(prompt, max_new_tokens=8, **sampling), adapter=adapter)


def test_each_request_gets_its_adapter(served: tuple[str, EngineProcess]) -> None:
    """Requests of three adapters and of none arrive together, for two slots. The reference has merged weights."""
    name, engines = served
    models: dict[str | None, PreTrainedModel] = {None: MODELS[name]()}
    for seed, (adapter, shape) in enumerate(SHAPES.items()):
        models[adapter] = merged_with(MODELS[name](), adapter_of(MODELS[name](), shape, seed))
    for temperature in (0.0, 1.0):
        requests = [
            with_adapter(prompt, adapter, temperature=temperature)
            for prompt in PROMPTS[:3]
            for adapter in ("a", None, "b", "c")
        ]
        results = engines.generate(name, requests)
        for request, result in zip(requests, results, strict=True):
            tokens = result.token_ids.tolist()
            model = models[request.adapter]
            if not temperature:
                assert tokens == greedy_reference(model, request.prompt_token_ids, 8), request.adapter
            expected = reference_logprobs(model, request.prompt_token_ids, tokens, request.sampling)
            assert result.logprobs.tolist() == pytest.approx(expected, abs=2e-4), request.adapter
        if not temperature:
            assert len({(r.adapter, *result.token_ids) for r, result in zip(requests, results, strict=True)}) == 12


def test_vllms_own_products_change_the_rows_of_others(engines: EngineProcess) -> None:
    """All slots are in use. vLLM gives rows without an adapter that of the last slot, which is why it is replaced."""
    rows = engines.look("tied", rows_of_wrappers)
    expected = torch.tensor([32.0, 0.0, 0.0, 320.0])[:, None].expand(4, 6)
    assert torch.equal(rows["own linear"], expected) and torch.equal(rows["own head"], expected)
    for layer in ("linear", "head"):
        assert rows[f"vllm {layer}"][1:3].eq(320.0).all(), "vLLM is repaired: its own products can be used again"


def test_requests_of_the_base_get_no_adapter_of_others(served: tuple[str, EngineProcess]) -> None:
    """They run among requests that fill all slots, and after them. Prompts and their cached blocks are equal."""
    name, engines = served
    prompts = [PROMPTS[3] * 2, *PROMPTS]
    base, model = [with_adapter(prompt, None, temperature=1.0) for prompt in prompts], MODELS[name]()
    for adapters in (("a", "b"), ("c", "a"), ()):
        others = [with_adapter(prompt, adapter, temperature=1.0) for adapter in adapters for prompt in prompts]
        results = engines.generate(name, [*others, *base])[len(others) :]
        for request, result in zip(base, results, strict=True):
            expected = reference_logprobs(model, request.prompt_token_ids, result.token_ids.tolist(), request.sampling)
            assert result.logprobs.tolist() == pytest.approx(expected, abs=2e-4)


def test_a_pass_of_several_adapters_gives_each_the_tokens_it_gets_alone(served: tuple[str, EngineProcess]) -> None:
    name, engines = served
    requests = [
        with_adapter(prompt, adapter, temperature=1.0) for prompt in PROMPTS for adapter in ("a", "b", "c", None)
    ]
    together = engines.generate(name, requests)
    alone = [engines.generate(name, [request])[0] for request in requests]
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-5)


def test_a_name_that_is_given_again_serves_the_new_adapter(engines: EngineProcess) -> None:
    """The long prompt is in the cache of keys and values from the first adapter of this name."""
    prompt = PROMPTS[3] * 3
    for seed in (7, 8):
        adapter = adapter_of(MODELS["tied"](), SHAPES["a"], seed)
        engines.look("tied", add, "again", adapter)
        (result,) = engines.generate("tied", [with_adapter(prompt, "again", temperature=0.0)])
        assert result.token_ids.tolist() == greedy_reference(merged_with(MODELS["tied"](), adapter), prompt, 8)
    engines.look("tied", drop, "again")
    assert "no adapter 'again'" in engines.look("tied", refusal_of, with_adapter(prompt, "again"))


@pytest.mark.parametrize(("name", "layers"), [("tied", {"holds_adapters": True}), ("tied sent", {"lora": LORA})])
def test_slots_have_the_size_of_the_forecast(
    name: str, layers: dict[str, Any], engines: EngineProcess, folders: dict[str, Path]
) -> None:
    """Two slots of rank 64, and the one slot of the sent adapter, are there before any adapter is."""
    own = SLOTS if "holds_adapters" in layers else {}
    settings = make_settings(folders["tied"], "vllm", load_weights=True, engine_kwargs=own, **layers)
    assert engines.look(name, bytes_of_slots) == adapter_slot_bytes(settings) > 0


def test_a_running_request_keeps_an_adapter_that_is_dropped(engines: EngineProcess) -> None:
    adapter = adapter_of(MODELS["tied"](), SHAPES["a"], 9)
    engines.look("tied", add, "dropped", adapter)
    request = with_adapter(PROMPTS[0], "dropped", temperature=0.0)
    tokens, (before, kept, after) = engines.look("tied", answer_after_drop, request)
    assert tokens == greedy_reference(merged_with(MODELS["tied"](), adapter), PROMPTS[0], 8)
    assert before == kept == after + 1


def test_what_an_engine_cannot_serve_is_refused_by_name(engines: EngineProcess) -> None:
    large = adapter_of(MODELS["tied"](), AdapterShape(rank=65, alpha=8.0), 1)
    before = engines.look("tied", held_in_worker)
    assert "'large' has rank 65, and the slots of this engine have 64" in engines.look(
        "tied", refusal_of_add, "large", large
    )
    assert engines.look("tied", held_in_worker) == before
    assert "no adapters" in engines.look("plain", refusal_of, with_adapter(PROMPTS[0], "a"))
    formed = replace(ask(PROMPTS[0]).sampling, grammar=Grammar("regex", "[ab]+"))
    assert "demanded form" in engines.look("tied", refusal_of, replace(ask(PROMPTS[0]), sampling=formed))


def test_an_adapter_that_overflows_fails_its_own_requests_only(engines: EngineProcess) -> None:
    """Blocks with keys and values that are not finite are used again by requests of others."""
    tame = adapter_of(MODELS["tied"](), SHAPES["a"], 0)
    wild = {name: value * 1e30 for name, value in tame.parameters().items()}
    engines.look("tied", add, "tame", tame)
    engines.look("tied", add, "wild", tame.with_parameters(wild))
    others = [with_adapter(prompt, adapter, temperature=0.0) for prompt in PROMPTS for adapter in ("tame", None)]
    alone = engines.generate("tied", others)
    failing = [with_adapter(prompt, "wild", temperature=0.0) for prompt in PROMPTS]
    for _ in range(3):
        results = engines.generate("tied", [*failing, *others])
        assert all("'wild' are not finite" in str(result.error) for result in results[: len(failing)])
        for ours, theirs in zip(results[len(failing) :], alone, strict=True):
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-5)


@pytest.fixture(scope="module")
def sender() -> Iterator[WeightSender]:
    sender = WeightSender([Lane(SPEC)], rank=0, is_node_leader=True)
    yield sender
    sender.close()


@dataclass
class Syncs:
    """Weight syncs of adapters."""

    engines: EngineProcess
    sender: WeightSender

    def send(self, name: str, adapter: dict[str, Tensor], version: int) -> list[str]:
        """Send an adapter to an engine, and return the names that its receipt has."""
        return self.engines.sync(name, self.sender, SPEC, WholeWeights(adapter.items), version)


@pytest.fixture(scope="module")
def syncs(engines: EngineProcess, sender: WeightSender) -> Syncs:
    return Syncs(engines, sender)


@pytest.mark.parametrize("name", MODELS)
def test_an_engine_computes_with_the_adapter_of_the_last_sync(name: str, engines: EngineProcess, syncs: Syncs) -> None:
    """A long prompt is in the cache from the version before."""
    prompts = [PROMPTS[3] * 3, *PROMPTS]
    for version in (1, 2):
        adapter = drawn(MODELS[name](), version)
        model = merged(MODELS[name](), adapter)
        assert syncs.send(f"{name} sent", adapter, version) == []
        requests = [ask(prompt, temperature=temperature) for prompt in prompts for temperature in (0.0, 1.0)]
        for request, result in zip(requests, engines.generate(f"{name} sent", requests), strict=True):
            tokens = result.token_ids.tolist()
            if not request.sampling.temperature:
                assert tokens == greedy_reference(model, request.prompt_token_ids, len(tokens))
            expected = reference_logprobs(model, request.prompt_token_ids, tokens, request.sampling)
            assert result.logprobs.tolist() == pytest.approx(expected, abs=2e-4)
            assert [span.version for span in result.weight_versions] == [version]


def test_what_did_not_arrive_is_named_and_what_does_not_belong_is_refused(engines: EngineProcess, syncs: Syncs) -> None:
    adapter = drawn(MODELS["untied"](), 5)
    missing = "model.layers.1.mlp.up_proj.lora_B"
    rest = {name: value for name, value in adapter.items() if name != missing}
    assert syncs.send("untied sent", rest, 5) == [missing]
    assert syncs.send("untied sent", adapter, 6) == []
    with pytest.raises(AssertionError, match=r"no tensor named model\.layers\.7\.lora_A"):
        syncs.send("untied sent", {"model.layers.7.lora_A": torch.zeros(4, 4)}, 7)
    spoilt = adapter | {missing: torch.full_like(adapter[missing], torch.nan)}
    syncs.send("untied sent", spoilt, 8)
    assert engines.call("untied sent", "weights_not_finite") == [missing]
    assert syncs.send("untied sent", adapter, 9) == []


@pytest.mark.parametrize("name", ["tied sent", "salted"])
def test_a_running_response_goes_on_with_the_new_adapter(name: str, engines: EngineProcess, syncs: Syncs) -> None:
    """Afterwards its prompt is in the cache from the first adapter, unless the cache was emptied."""
    adapters = {version: drawn(MODELS["tied"](), version) for version in (11, 12)}
    models = {version: merged(MODELS["tied"](), adapter) for version, adapter in adapters.items()}
    request = ask(PROMPTS[3] * 3, temperature=0.0, max_new_tokens=40)
    result = engines.look(name, interrupted, request, adapters)
    (_, first), (start, second) = result.weight_versions
    assert (first, second) == (11, 12) and 5 <= start < 40
    if name == "tied sent":
        check_spans(request, result, models, result.weight_versions)
    (again,) = engines.generate(name, [request])
    assert again.token_ids.tolist() == greedy_reference(models[12], request.prompt_token_ids, 40)
