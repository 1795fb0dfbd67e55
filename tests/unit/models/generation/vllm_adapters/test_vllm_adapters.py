"""Adapters in vLLM: whose model draws a response, what tenants share, and what a weight sync of adapters changes."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_looks import add, blocks_in_use, drop, num_in_worker, row_of_products, vllm_row
from engine_process import EngineProcess
from generation_helpers import (
    PROMPTS,
    ask,
    greedy_reference,
    make_mixture,
    make_model,
    make_settings,
    reference_logprobs,
    save_model,
)
from test_lora_refit import LORA, drawn, merged
from transformers import PreTrainedModel

from nemo_rl.models.adapters.slots import slot_names
from nemo_rl.models.adapters.tensors import AdapterShape, AdapterTensors, new_adapter
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.parts import WholeWeights
from nemo_rl.weight_sync.transport import TransportSpec

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]

SPEC = TransportSpec("shared_memory", run_id="test", bucket_size_bytes=10_000)
MODELS = {
    "tied": lambda: make_model("qwen2", True, seed=1),
    "untied": lambda: make_model("llama", False, seed=1),
    "experts": lambda: make_mixture("qwen3_moe", seed=1),
}
SHAPES = {
    "a": AdapterShape(rank=2, alpha=8.0),
    "b": AdapterShape(rank=3, alpha=8.0, mlp=False),
    "c": AdapterShape(rank=9, alpha=4.0, unembed=False),
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
    settings["salted"] = make_settings(
        folders["tied"], "vllm", load_weights=True, lora=LORA, recomputes_cache=False
    )
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
