"""The models of the training service through real processes: results, tenants, files, refusals, a lost engine."""

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.models.adapters.tensors import AdapterShape
from nemo_rl.models.adapters.training import AdamParams
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.serving.interfaces import (
    LossSpec,
    RequestError,
    ScoreRequest,
    TrainingDatum,
)
from nemo_rl.serving.models import ServedModels, check_served, open_models
from nemo_rl.utils.errors import ConfigError

pytestmark = pytest.mark.ray

BASE = str(Path(__file__).parents[3] / "examples/assets/tiny-chat")
CLUSTER = ClusterConfig.build(device="cpu", gpus_per_node=0)
SPEC = AdapterShape(rank=4, seed=1)
CE, IS = LossSpec("cross_entropy"), LossSpec("importance_sampling")
TOKENS = SamplingParams(max_new_tokens=12)
PROMPT = [256, 40, 41, 42, 43, 44]


def policy(**values: Any) -> PolicyConfig:
    keys = {
        "precision": "float32",
        "max_total_sequence_length": 64,
        "train_micro_batch_size": 2,
        "zero_mismatch": True,
        "optimizer": None,
        "generation": {"backend": "hf"},
    }
    return PolicyConfig.build(model_name=BASE, **keys | values)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def models(local_ray) -> Iterator[ServedModels]:
    opened = open_models(policy(), CLUSTER, seed=0)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def others(local_ray) -> Iterator[ServedModels]:
    """The same models in other processes."""
    opened = open_models(policy(), CLUSTER, seed=0, name="others")
    yield opened
    opened.close()


def datum(seed: int, length: int, loss: LossSpec = CE, k: int = 0) -> TrainingDatum:
    """Make a sequence whose targets are not its next tokens, with weights of any sign."""
    generator = np.random.default_rng(seed)
    shape = (length, k) if k else (length,)
    inputs: dict[str, Any] = {"target_tokens": generator.integers(0, 264, shape)}
    if loss == CE:
        inputs["weights"] = generator.normal(size=shape).astype(np.float32)
    else:
        inputs["logprobs"] = generator.normal(size=shape).astype(np.float32) - 3
        inputs["advantages"] = generator.normal(size=shape).astype(np.float32)
    return TrainingDatum(generator.integers(0, 256, length).astype(np.int32), inputs)


def hf_logprobs(token_ids: list[int], dtype: torch.dtype = torch.float64) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=dtype)
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].log_softmax(-1).numpy()


def test_the_first_pass_is_that_of_transformers(models, loop):
    async def use() -> None:
        await models.create("first", SPEC)
        data = [datum(0, 9), datum(1, 20, k=3), datum(2, 5)]
        result = await models.run_pass("first", data, CE, backward=True)
        total = 0.0
        for one, output in zip(data, result.outputs, strict=True):
            targets = one.inputs["target_tokens"]
            columns = targets if targets.ndim == 2 else targets[:, None]
            wanted = np.take_along_axis(hf_logprobs(one.token_ids.tolist()), columns, 1).reshape(targets.shape)
            np.testing.assert_allclose(output["logprobs"], wanted, rtol=0, atol=1e-5)
            total -= float((one.inputs["weights"] * wanted).sum())
        assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
        assert all(name.count(":") == 1 for name in result.metrics)
        forward = await models.run_pass("first", data, CE, backward=False)
        for one, other in zip(result.outputs, forward.outputs, strict=True):
            np.testing.assert_array_equal(one["logprobs"], other["logprobs"])

    loop.run(use())


async def tenant(models: ServedModels, name: str, seed: int, folder: Path) -> list[Any]:
    """Train, sample and save as one tenant does, and return everything that it sees."""
    spec = AdapterShape(rank=2 + seed, seed=seed, train_mlp=seed != 1, train_unembed=seed != 2)
    seen: list[Any] = []
    await models.create(name, spec)
    for step in range(4):
        loss = IS if step % 2 else CE
        for part in range(2):
            data = [datum(100 * seed + 10 * step + part, 6 + 3 * part, loss), datum(seed + step, 12, loss)]
            result = await models.run_pass(name, data, loss, backward=True)
            seen += [result.metrics["loss:sum"], *(output["logprobs"].tobytes() for output in result.outputs)]
        seen.append(await models.update(name, AdamParams(learning_rate=0.02, grad_clip_norm=5.0 * (step % 2))))
    await models.publish(name, f"{name}@1")
    draws = [models.sample(f"{name}@1", PROMPT + [50 + n], TOKENS, seed=n) for n in range(4)]
    for response in await asyncio.gather(*draws):
        seen += [response.token_ids.tobytes(), response.logprobs.tobytes()]
    seen.append((await models.score(f"{name}@1", PROMPT + [60], ScoreRequest())).logprobs.tobytes())
    await models.save(name, folder / name, with_optimizer=True)
    return [*seen, *((file.name, file.read_bytes()) for file in sorted((folder / name).iterdir()))]


def test_each_tenant_gets_the_bits_that_it_gets_alone(models, others, loop, tmp_path):
    """Three tenants and requests of the base at once, against each of them alone in other processes."""
    base = [(PROMPT[:length], seed) for seed, length in enumerate((1, 3, 6, 2))]

    async def bases(served: ServedModels) -> list[Any]:
        responses = [await served.sample(None, prompt, TOKENS, seed=seed) for prompt, seed in base]
        return [(response.token_ids.tobytes(), response.logprobs.tobytes()) for response in responses]

    async def together() -> list[list[Any]]:
        tenants = [tenant(models, f"t{n}", n, tmp_path / "together") for n in range(3)]
        return await asyncio.gather(*tenants, bases(models))

    async def alone() -> list[list[Any]]:
        one_by_one = [await tenant(others, f"t{n}", n, tmp_path / "alone") for n in range(3)]
        return [*one_by_one, await bases(others)]

    ours, theirs = loop.run(together()), loop.run(alone())
    assert ours == theirs
    assert len({str(seen) for seen in ours}) == 4


def test_a_saved_adapter_continues_in_other_processes(models, others, loop, tmp_path):
    """With the same bits, if its optimizer was saved too; a sampler from its folder has the bits of a published one."""

    async def go_on(served: ServedModels, name: str) -> list[Any]:
        result = await served.run_pass(name, [datum(7, 11)], CE, backward=True)
        norm = await served.update(name, AdamParams(learning_rate=0.05, grad_clip_norm=0.5))
        after = await served.run_pass(name, [datum(8, 11)], CE, backward=False)
        return [result.metrics, after.metrics, after.outputs[0]["logprobs"].tobytes(), norm]

    async def use() -> None:
        await models.create("saved", SPEC)
        for _ in range(2):
            await go_on(models, "saved")
        await models.save("saved", tmp_path / "saved", with_optimizer=True)
        await models.publish("saved", "saved@1")
        await models.save_sampler("saved@1", tmp_path / "sampler")
        assert await others.load("again", tmp_path / "saved", with_optimizer=True) == SPEC
        assert await others.load("fresh", tmp_path / "saved", with_optimizer=False) == SPEC
        await others.load_sampler("again@1", tmp_path / "sampler")
        mine, again, fresh = [await go_on(*each) for each in ((models, "saved"), (others, "again"), (others, "fresh"))]
        assert mine == again and mine[0] == fresh[0] and mine[2] != fresh[2]
        first, second = [
            await served.sample(sampler, PROMPT, TOKENS, seed=3)
            for served, sampler in ((models, "saved@1"), (others, "again@1"))
        ]
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        np.testing.assert_array_equal(first.logprobs, second.logprobs)

    loop.run(use())


async def trained(models: ServedModels, name: str) -> None:
    await models.create(name, SPEC)
    for seed in range(3):
        await models.run_pass(name, [datum(seed, 12)], CE, backward=True)
        await models.update(name, AdamParams(learning_rate=0.05))


def test_scores_are_those_of_passes_and_samples(models, loop):
    async def use() -> None:
        await trained(models, "scored")
        await models.publish("scored", "scored@1")
        response = await models.sample("scored@1", PROMPT, TOKENS, seed=1)
        whole = [*PROMPT, *response.token_ids.tolist()]
        further = np.full((len(whole) - 1, 2), -1)
        further[4:, 1] = 17
        scores = await models.score("scored@1", whole, ScoreRequest(top_k=3, targets=further))
        np.testing.assert_array_equal(scores.logprobs[len(PROMPT) :], response.logprobs)
        targets = np.array(whole[1:])
        given = {"target_tokens": targets, "weights": np.zeros(len(targets), np.float32)}
        passed = await models.run_pass(
            "scored", [TrainingDatum(np.array(whole[:-1], np.int32), given)], CE, backward=False
        )
        np.testing.assert_array_equal(scores.logprobs[1:], passed.outputs[0]["logprobs"])
        assert np.isnan(scores.logprobs[0])
        assert np.isnan(scores.target_logprobs[:, 0]).all() and np.isnan(scores.target_logprobs[:4, 1]).all()
        assert scores.top_ids.shape == (len(whole), 3) and (scores.top_ids[0] == 0).all()
        assert (scores.top_logprobs[0] == -99999.0).all()
        assert (np.diff(scores.top_logprobs[1:]) <= 0).all()
        for position in range(1, len(whole)):
            where = scores.top_ids[position] == whole[position]
            same = scores.top_logprobs[position][where] == scores.logprobs[position]
            assert same.all()
        seventeen = {"target_tokens": np.full(len(targets), 17), "weights": np.zeros(len(targets), np.float32)}
        of_17 = await models.run_pass(
            "scored", [TrainingDatum(np.array(whole[:-1], np.int32), seventeen)], CE, backward=False
        )
        np.testing.assert_array_equal(scores.target_logprobs[4:, 1], of_17.outputs[0]["logprobs"][4:])
        last = await models.score("scored@1", whole, ScoreRequest(last_n=2, top_k=1))
        assert np.isnan(last.logprobs[:-2]).all() and (last.top_logprobs[:-2] == -99999.0).all()
        np.testing.assert_array_equal(last.logprobs[-2:], scores.logprobs[-2:])
        single = await models.score(None, [5], ScoreRequest(top_k=2, targets=np.empty((0, 1), np.int64)))
        assert np.isnan(single.logprobs).all() and single.target_logprobs.shape == (0, 1)
        base = await models.score(None, whole, ScoreRequest())
        wanted = hf_logprobs(whole)
        np.testing.assert_allclose(base.logprobs[1:], wanted[np.arange(len(targets)), targets], rtol=0, atol=1e-5)

    loop.run(use())


def test_a_sampler_keeps_its_weights_until_it_is_dropped(models, loop):
    async def use() -> None:
        await trained(models, "moving")
        await models.publish("moving", "moving@1")
        before = await models.sample("moving@1", PROMPT, TOKENS, seed=2)
        await models.run_pass("moving", [datum(5, 9)], CE, backward=True)
        await models.update("moving", AdamParams(learning_rate=0.5))
        await models.publish("moving", "moving@2")
        await models.drop("moving")
        old, new = [await models.sample(f"moving@{n}", PROMPT, TOKENS, seed=2) for n in (1, 2)]
        np.testing.assert_array_equal(before.logprobs, old.logprobs)
        assert not np.array_equal(old.token_ids, new.token_ids)
        await models.drop_sampler("moving@1")
        with pytest.raises(RequestError, match="no sampler 'moving@1'"):
            await models.sample("moving@1", PROMPT, TOKENS, seed=2)
        with pytest.raises(RequestError, match="no adapter 'moving'"):
            await models.update("moving", AdamParams())
        again = await models.sample("moving@2", PROMPT, TOKENS, seed=2)
        np.testing.assert_array_equal(again.logprobs, new.logprobs)

    loop.run(use())


def with_inputs(one: TrainingDatum, **inputs: Any) -> TrainingDatum:
    return replace(one, inputs=dict(one.inputs) | inputs)


BAD_PASSES = {
    "no sequences": ([], CE),
    "There is no loss 'sum'": ([datum(0, 4)], LossSpec("sum")),
    "no setting 'beta'": ([datum(0, 4)], LossSpec("cross_entropy", {"beta": 1.0})),
    "Sequence 1: The loss 'cross_entropy' needs the inputs weights": ([datum(0, 4), datum(0, 4, IS)], CE),
    "Sequence 0: target_tokens has the shape": ([replace(datum(0, 4), token_ids=np.arange(5, dtype=np.int32))], CE),
    "Sequence 0: weights holds NaN": ([with_inputs(datum(0, 2), weights=np.array([1.0, np.nan], np.float32))], CE),
    "token ids are 0 to 263": ([with_inputs(datum(0, 2), target_tokens=np.array([1, 264]))], CE),
    "has the token -1": ([replace(datum(0, 2), token_ids=np.array([1, -1], np.int32))], CE),
    "reads at most 64": ([datum(0, 65)], CE),
    "nothing was added": ([with_inputs(datum(0, 2, IS), logprobs=np.full(2, -1e5, np.float32))], IS),
}


def test_requests_that_cannot_be_served_change_nothing(models, loop, tmp_path):
    async def refused(call: Coroutine[Any, Any, Any], message: str) -> None:
        with pytest.raises(RequestError, match=message):
            await call

    async def use() -> None:
        for name in ("tried", "calm"):
            await models.create(name, SPEC)
            await models.run_pass(name, [datum(1, 8)], CE, backward=True)
        for message, (data, loss) in BAD_PASSES.items():
            await refused(models.run_pass("tried", data, loss, backward=True), message)
        for params, message in (
            (AdamParams(learning_rate=float("nan")), "learning_rate=nan"),
            (AdamParams(beta2=1.0), "beta2=1.0 cannot be used: it has to be at least 0 and below 1"),
            (AdamParams(eps=0.0), "eps=0.0"),
            (AdamParams(learning_rate=1e39), "would make values infinite"),
        ):
            await refused(models.update("tried", params), message)
        await refused(models.create("other", AdapterShape(rank=0)), "rank=0")
        none = AdapterShape(train_attn=False, train_mlp=False, train_unembed=False)
        await refused(models.create("other", none), "some layers")
        await refused(models.load("other", tmp_path / "none", with_optimizer=False), "holds no adapter_config.json")
        await refused(models.load_sampler("other", tmp_path / "none"), "holds no adapter_config.json")
        await refused(models.run_pass("nobody's", [datum(0, 4)], CE, backward=True), "no adapter")
        await refused(models.sample("none", PROMPT, TOKENS, 0), "no sampler 'none'")
        await refused(models.sample(None, [], TOKENS, 0), "at least one token")
        await refused(models.sample(None, [264], TOKENS, 0), "token 264")
        await refused(models.sample(None, [1] * 64, TOKENS, 0), "no room for a response")
        await refused(models.sample(None, PROMPT, SamplingParams(temperature=-1.0), 0), "temperature=-1.0")
        await refused(models.score(None, PROMPT, ScoreRequest(top_k=1000)), "top_k=1000")
        await refused(models.score(None, PROMPT, ScoreRequest(targets=np.zeros((2, 1)))), "need 5 rows")
        await refused(models.save("tried", tmp_path, with_optimizer=False), "exists")
        for name in ("tried", "calm"):
            await models.update(name, AdamParams(learning_rate=0.1))
            await models.save(name, tmp_path / name, with_optimizer=True)
        for file in sorted((tmp_path / "calm").iterdir()):
            assert file.read_bytes() == (tmp_path / "tried" / file.name).read_bytes()

    loop.run(use())


def test_an_engine_that_dies_gets_its_samplers_again(models, loop):
    async def use() -> None:
        await trained(models, "kept")
        await models.publish("kept", "kept@1")
        before = await models.sample("kept@1", PROMPT, TOKENS, seed=4)
        os.kill(models._engines.workers.worker_metadata[0]["pid"], signal.SIGKILL)
        after = await models.sample("kept@1", PROMPT, TOKENS, seed=4)
        np.testing.assert_array_equal(before.token_ids, after.token_ids)
        os.kill(models._engines.workers.worker_metadata[0]["pid"], signal.SIGKILL)
        await models.publish("kept", "kept@2")
        for sampler in ("kept@1", "kept@2"):
            again = await models.sample(sampler, PROMPT, TOKENS, seed=4)
            np.testing.assert_array_equal(before.token_ids, again.token_ids)

    loop.run(use())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"generation": {"backend": "megatron"}}, "backend=megatron has no adapters. Set it to vllm or hf"),
        ({"dtensor_cfg": {"tensor_parallel_size": 2}}, "dtensor_cfg.tensor_parallel_size=2"),
        ({"dtensor_cfg": {"context_parallel_size": 2}}, "dtensor_cfg.context_parallel_size=2"),
        ({"dtensor_cfg": {"pipeline_parallel_size": 2}}, "dtensor_cfg.pipeline_parallel_size=2"),
        ({"dtensor_cfg": {"lora_cfg": {"enabled": True}}}, "lora_cfg.enabled=true"),
        ({"megatron_cfg": {"enabled": True}, "dtensor_cfg": {"enabled": False}}, "policy.megatron_cfg is enabled"),
    ],
)
def test_settings_that_are_not_served_are_refused_by_name(values, message):
    with pytest.raises(ConfigError, match=message):
        check_served(policy(**values, zero_mismatch=False), CLUSTER)
