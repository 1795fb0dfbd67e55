"""The models of the training service with the engine vllm: samples, their scores, tenants, and a lost engine."""

import asyncio
import importlib.util
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from test_models import BASE, CE, CLUSTER, PROMPT, TOKENS, datum, hf_logprobs, policy
from transformers import AutoModelForCausalLM

from nemo_rl.models.adapters.tensors import AdapterShape, AdapterTensors
from nemo_rl.models.adapters.training import AdamParams
from nemo_rl.serving.interfaces import ScoreRequest
from nemo_rl.serving.models import ServedModels, check_served, open_models
from nemo_rl.utils.errors import ConfigError

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]

NAMES = [f"tenant {number}" for number in range(5)]
"""More tenants than vLLM has slots for adapters."""
VLLM = {"generation": {"backend": "vllm"}, "zero_mismatch": False}


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def models(local_ray: object, loop: asyncio.Runner) -> Iterator[ServedModels]:
    """The models with a sampler for each of the names, which are of different ranks and layers."""
    opened = open_models(policy(**VLLM), CLUSTER, seed=0, name="vllm", max_rank=8)
    loop.run(train(opened))
    yield opened
    opened.close()


async def train(models: ServedModels) -> None:
    for number, name in enumerate(NAMES):
        spec = AdapterShape(rank=2 + number, seed=number, train_mlp=number != 1, train_unembed=number != 2)
        await models.create(name, spec)
        for step in range(3):
            await models.run_pass(name, [datum(10 * number + step, 12)], CE, backward=True)
            await models.update(name, AdamParams(learning_rate=0.05))
        await models.publish(name, f"{name}@1")


def merged_logprobs(adapter: AdapterTensors, token_ids: list[int]) -> np.ndarray:
    """Compute log-probabilities `[T, V]` in float64 with an adapter that is added to the weights of transformers."""
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    with torch.no_grad():
        for name, pair in adapter.pairs.items():
            model.get_submodule(name).weight += pair.scaling * pair.b.double() @ pair.a.double()
        found: np.ndarray = model(torch.tensor([token_ids])).logits[0].log_softmax(-1).numpy()
    return found


def test_samples_of_many_tenants_at_once_have_the_probabilities_of_their_adapters(models, loop) -> None:
    """The references are merged weights in float64, and the scores of the ranks. The base is one of the tenants.

    vLLM with merged weights differs from float64 as much.
    """

    async def use() -> list[tuple[str | None, np.ndarray, np.ndarray, np.ndarray]]:
        samplers = [*(f"{name}@1" for name in NAMES), None]
        asked = [(sampler, seed) for seed in range(4) for sampler in samplers]
        draws = [models.sample(sampler, PROMPT, TOKENS, seed=seed) for sampler, seed in asked]
        found = []
        for (sampler, _), response in zip(asked, await asyncio.gather(*draws), strict=True):
            whole = [*PROMPT, *response.token_ids.tolist()]
            scores = await models.score(sampler, whole, ScoreRequest())
            found.append((sampler, response.token_ids, response.logprobs, scores.logprobs[len(PROMPT) :]))
        return found

    found = loop.run(use())
    for sampler, tokens, logprobs, scores in found:
        whole = [*PROMPT, *tokens.tolist()]
        table = hf_logprobs(whole) if sampler is None else merged_logprobs(models._samplers[sampler], whole)
        wanted = table[np.arange(len(PROMPT) - 1, len(whole) - 1), tokens]
        np.testing.assert_allclose(logprobs, wanted, rtol=0, atol=5e-4)
        np.testing.assert_allclose(logprobs, scores, rtol=0, atol=5e-4)
    assert len({tokens.tobytes() for _, tokens, _, _ in found}) > 18


def test_an_engine_that_dies_gets_its_samplers_again(models, loop) -> None:
    async def use() -> None:
        samplers = [*(f"{name}@1" for name in NAMES), None]
        before = [await models.sample(sampler, PROMPT, TOKENS, seed=4) for sampler in samplers]
        os.kill(models._engines.workers.worker_metadata[0]["pid"], signal.SIGKILL)
        for sampler, expected in zip(samplers, before, strict=True):
            response = await models.sample(sampler, PROMPT, TOKENS, seed=4)
            np.testing.assert_array_equal(response.token_ids, expected.token_ids)

    loop.run(use())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"zero_mismatch": True}, "zero_mismatch"),
        ({"generation": {"backend": "vllm", "engine": {"tensor_parallel_size": 2}}}, "engine.tensor_parallel_size=2"),
        ({"generation": {"backend": "vllm", "engine": {"precision": "fp8"}}}, "precision=auto, not fp8"),
        (
            {"generation": {"backend": "vllm", "vllm_kwargs": {"speculative_config": {"method": "ngram"}}}},
            "not proven with policy.generation.vllm_kwargs.speculative_config",
        ),
        ({"generation": {"backend": "sglang"}}, "backend=sglang has no adapters. Set it to vllm or hf"),
    ],
)
def test_settings_that_are_not_served_are_refused_by_name(values, message) -> None:
    with pytest.raises(ConfigError, match=message):
        check_served(policy(**(VLLM | values)), CLUSTER)
