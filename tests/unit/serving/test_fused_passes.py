"""Passes of several models share one pass over the base: results, isolation, turns side by side, refusals."""

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_models import FakeModels
from running import Raw, config_in, service
from test_models import CE, CLUSTER, IS, datum, policy
from transformers import Qwen3MoeConfig

from nemo_rl.models.adapters.tensors import AdapterShape
from nemo_rl.models.adapters.training import AdamParams
from nemo_rl.models.policy.workers.adapter_rank import NamedLoss
from nemo_rl.serving.fused_passes import PassQueue
from nemo_rl.serving.interfaces import RequestError
from nemo_rl.serving.models import ServedModels, check_served, open_models
from nemo_rl.utils.errors import ConfigError

NUM_TENANTS = 3
SHAPES = (AdapterShape(rank=2, seed=1), AdapterShape(rank=5, seed=2, train_unembed=False), AdapterShape(seed=3))


@pytest.fixture(scope="module")
def models(local_ray: None) -> Iterator[ServedModels]:
    opened = open_models(policy(), CLUSTER, seed=0, name="fused", fused_models=NUM_TENANTS)
    yield opened
    opened.close()


async def steps(models: ServedModels, name: str, number: int) -> list[np.ndarray]:
    """Train an adapter for some steps, and return its losses, norms and log-probabilities."""
    await models.create(name, SHAPES[number])
    seen: list[np.ndarray] = []
    for step in range(3):
        loss = IS if step == 1 else CE
        data = [datum(10 * number + step, 6 + number, loss), datum(step, 12, loss)]
        result = await models.run_pass(name, data, loss, backward=True)
        seen += [np.asarray(result.metrics["loss:sum"]), *(output["logprobs"] for output in result.outputs)]
        seen.append(np.asarray((await models.update(name, AdamParams(learning_rate=0.02)))["grad_norm"]))
    return seen


@pytest.mark.ray
def test_adapters_get_the_values_that_they_get_alone(models, monkeypatch):
    """Three adapters at once, whose passes share the base, and the same adapters one after another."""
    sizes: list[int] = []
    run_passes = models._policy.run_passes

    def counted(rows: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(rows))
        return run_passes(rows, *args, **kwargs)

    monkeypatch.setattr(models._policy, "run_passes", counted)

    async def use() -> tuple[list[Any], list[Any]]:
        together = await asyncio.gather(*(steps(models, f"together {n}", n) for n in range(NUM_TENANTS)))
        assert max(sizes) > 1 and sum(sizes) == 3 * NUM_TENANTS
        sizes.clear()
        alone = [await steps(models, f"alone {n}", n) for n in range(NUM_TENANTS)]
        assert set(sizes) == {1}
        return together, alone

    together, alone = asyncio.run(use())
    for ours, theirs in zip(together, alone, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.ray
def test_extreme_inputs_of_one_user_are_refused_and_others_get_their_bits(models):
    wild = [datum(0, 4, IS)]
    wild[0].inputs["logprobs"][:] = -1e5

    async def use() -> None:
        for name in ("wild", "calm", "quiet"):
            await models.create(name, SHAPES[0])
        data = [datum(7, 9, IS)]
        passes = [models.run_pass(name, rows, IS, backward=True) for name, rows in (("wild", wild), ("calm", data))]
        refused, calm = await asyncio.gather(*passes, return_exceptions=True)
        assert isinstance(refused, RequestError) and "nothing was added" in str(refused)
        quiet = await models.run_pass("quiet", data, IS, backward=True)
        assert calm.metrics == quiet.metrics
        np.testing.assert_array_equal(calm.outputs[0]["logprobs"], quiet.outputs[0]["logprobs"])
        norms = [await models.update(name, AdamParams()) for name in ("calm", "quiet", "wild")]
        assert norms[0] == norms[1] and norms[2]["grad_norm"] == 0

    asyncio.run(use())


def test_only_passes_with_the_same_loss_are_joined_and_errors_reach_all_of_a_call():
    calls: list[list[str]] = []

    async def run_passes(rows: Mapping[str, Any], loss: NamedLoss, backward: bool) -> dict[str, Any]:
        calls.append(sorted(rows))
        if loss.name == "broken":
            raise ValueError("a rank")
        return {name: (1.0, rows[name]) for name in rows}

    async def use() -> None:
        queue = PassQueue(run_passes, most=2)
        given = {"a": "x", "b": "y", "c": "x", "d": "x", "e": "broken", "f": "broken"}
        runs = [queue.run(name, name, NamedLoss(loss), backward=True) for name, loss in given.items()]  # type: ignore[arg-type]
        results = await asyncio.gather(*runs, return_exceptions=True)
        assert [result[1] for result in results[:4]] == ["a", "b", "c", "d"]
        assert [str(result) for result in results[4:]] == ["a rank", "a rank"]
        assert calls == [["a", "c"], ["b"], ["d"], ["e", "f"]]
        assert await queue.run("a", "again", NamedLoss("x"), backward=False) == (1.0, "again")  # type: ignore[arg-type]

    asyncio.run(use())


class CountingModels(FakeModels):
    """The fake models, which count calls that run at the same time."""

    most, running = 0, 0

    async def _work(self, what: str, name: str) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await super()._work(what, name)
        finally:
            self.running -= 1


def trained(url: str, number: int) -> list[Any]:
    """Train a model of a client, and return what the client sees."""
    client = Raw(url, key=f"tml-{number}")
    model = client.model(client.session(), seed=number)
    seen: list[Any] = []
    for step in range(5):
        made = client.submit_pass(model, 1 + 2 * step, [[1 + number, 2, 3, 4 + step]])
        seen.append(client.output(made["request_id"])[1])
        adam = {"learning_rate": 0.1}
        made = client.ok("optim_step", model_id=model, seq_id=2 + 2 * step, adam_params=adam)
        seen.append(client.result(made["request_id"]))
    return seen


def test_turns_run_side_by_side_and_models_share_the_memory(tmp_path: Path):
    """Six users and three places in memory: results are those of turns one after another."""
    found: dict[int, list[Any]] = {}
    for fused in (1, 2):
        models = CountingModels(delay_s=0.01)
        config = config_in(tmp_path / str(fused), fused_models=fused, max_resident_models=3, state_every=2)
        with service(models, config) as url, ThreadPoolExecutor(6) as threads:
            found[fused] = list(threads.map(lambda number, url=url: trained(url, number), range(6)))
        assert models.most == fused
        loads = [what for what, _ in models.calls if what in ("create", "load")]
        assert len(loads) > 6 and len(models.adapters) <= 3
    assert found[1] == found[2]


def test_more_models_than_places_in_memory_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="Set max_resident_models to at least fused_models"):
        config_in(tmp_path, fused_models=9)


def test_models_with_experts_are_refused(tmp_path: Path):
    Qwen3MoeConfig(num_hidden_layers=2, hidden_size=32, num_experts=4).save_pretrained(tmp_path)
    mixture = policy().model_copy(update={"model_name": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"fused_models=2, but .* has experts"):
        check_served(mixture, CLUSTER, fused_models=2)
