"""The check of a run's first weight sync: what it lets pass, what it stops, and which layer it names."""

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TinyShape, make_char_tokenizer, make_tiny_model, save_tiny_checkpoint
from transformers import PreTrainedModel

from nemo_rl.algorithms.rollout.sync_setup import SyncProbe, suspect_layer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.hf import HfEngine
from nemo_rl.models.generation.interfaces import EngineSettings, GenerationRequest, GenerationResult, SamplingParams
from nemo_rl.models.huggingface.layers import decoder_layers, recorded_outputs
from nemo_rl.utils.errors import WeightSyncError

SHAPE = TinyShape(hidden_size=64, intermediate_size=96, num_layers=4, num_heads=2, num_kv_heads=1)


class ModelPolicy:
    """A plain model with the methods of `Policy` that the probe uses; counts how often it scores."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.num_scored = 0

    @torch.no_grad()
    def get_logprobs(self, batch: BatchedDataDict[Any]) -> dict[str, torch.Tensor]:
        self.num_scored += 1
        logprobs = self.model(batch["input_ids"]).logits[:, :-1].log_softmax(-1)
        scored = logprobs.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
        return {"logprobs": torch.nn.functional.pad(scored, (1, 0))}

    @torch.no_grad()
    def layer_outputs(self, token_ids: list[int]) -> tuple[list[str], list[torch.Tensor]]:
        layers = decoder_layers(self.model)
        with recorded_outputs(layers) as outputs:
            self.model(torch.tensor([token_ids]))
        return [f"model.layers.{index}" for index in range(len(layers))], outputs


class Engines:
    """Engines that answer the calls of a worker group."""

    def __init__(self, *engines: HfEngine):
        self.engines = engines
        self.membership = 0
        self.workers = self

    def call_all(self, method: str, *args: Any) -> list[Any]:
        return [asyncio.run(getattr(engine, method)(*args)) for engine in self.engines]

    def get_all_worker_results(self, results: list[Any], *_: Any) -> list[Any]:
        return results

    def of_engines(self, results: list[Any]) -> list[Any]:
        return results


class Turns:
    """Remembers who was given the device."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def ensure_fresh(self) -> None:
        self.calls.append("engines")

    def before_training(self) -> None:
        self.calls.append("policy")


@pytest.fixture
def model() -> PreTrainedModel:
    model = make_tiny_model("qwen2", SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    return model


def engine_of(folder: Path, model: PreTrainedModel) -> HfEngine:
    save_tiny_checkpoint(folder, model, make_char_tokenizer())
    return HfEngine(EngineSettings("hf", str(folder), str(folder), "cpu", "float32", max_model_len=128))


def sampled_batch(engine: HfEngine, num_rows: int = 4) -> BatchedDataDict[Any]:
    """Answers of exactly eight tokens to prompts of three, as `build_training_batch` lays them out."""

    async def answers() -> list[GenerationResult]:
        sampling = SamplingParams(max_new_tokens=8)
        requests = [GenerationRequest([40 + row, 50, 60], sampling, row) for row in range(num_rows)]
        return list(await asyncio.gather(*(engine.generate(str(r.seed), r) for r in requests)))

    rows = asyncio.run(answers())
    return BatchedDataDict(
        {
            "input_ids": torch.tensor([[40 + i, 50, 60, *row.token_ids] for i, row in enumerate(rows)]),
            "input_lengths": torch.full((num_rows,), 11),
            "token_mask": torch.tensor([[0.0] * 3 + [1.0] * 8] * num_rows),
            "generation_logprobs": torch.tensor([[0.0] * 3 + row.logprobs.tolist() for row in rows]),
        }
    )


def make_probe(policy: Any, engines: Any, turns: Any, max_error: float | None = 1.05) -> SyncProbe:
    return SyncProbe(policy, engines, turns, max_error, timeout_s=10.0, precision="float32")


def test_equal_models_pass_and_are_compared_once_for_each_set_of_engines(tmp_path, model):
    engine, turns = engine_of(tmp_path, model), Turns()
    policy, engines = ModelPolicy(model), Engines(engine)
    probe, batch = make_probe(policy, engines, turns), sampled_batch(engine)
    nothing_sampled = BatchedDataDict({**batch, "token_mask": torch.zeros_like(batch["token_mask"])})
    for given, num_scored in ((nothing_sampled, 0), (batch, 1), (batch, 1)):
        probe.check(given)
        assert policy.num_scored == num_scored
    engines.membership = 1
    probe.check(batch)
    assert (policy.num_scored, turns.calls) == (2, [])


@pytest.mark.parametrize("layer", range(4))
def test_a_tampered_layer_of_one_engine_is_named_before_an_update(tmp_path, model, layer):
    right = engine_of(tmp_path / "right", model)
    tampered = copy.deepcopy(model)
    with torch.no_grad():
        tampered.model.layers[layer].mlp.down_proj.weight.mul_(-1)
    wrong, turns = engine_of(tmp_path / "wrong", tampered), Turns()
    probe = make_probe(ModelPolicy(model), Engines(right, wrong), turns)
    with pytest.raises(WeightSyncError, match=rf"Engine 1: model\.layers\.{layer} .*is suspect") as stop:
        probe.check(sampled_batch(wrong))
    assert "max_mult_prob_error=1.05" in str(stop.value)
    assert "Engine 0: all decoder layers agree" in str(stop.value)
    assert turns.calls == ["engines", "policy"]
    make_probe(ModelPolicy(model), Engines(right, wrong), turns, None).check(sampled_batch(wrong))


def test_a_tampered_head_is_not_blamed_on_a_layer(tmp_path, model):
    tampered = copy.deepcopy(model)
    with torch.no_grad():
        tampered.model.norm.weight.mul_(3)
    wrong = engine_of(tmp_path, tampered)
    with pytest.raises(WeightSyncError, match="the final norm or the output head is suspect"):
        make_probe(ModelPolicy(model), Engines(wrong), Turns()).check(sampled_batch(wrong))


def test_log_probabilities_that_are_not_numbers_stop_the_run(tmp_path, model):
    engine = engine_of(tmp_path, model)
    batch = sampled_batch(engine)
    batch["generation_logprobs"][0, 5] = float("nan")
    with pytest.raises(WeightSyncError, match="mult_prob_error is nan"):
        make_probe(ModelPolicy(model), Engines(engine), Turns()).check(batch)


def test_rounding_that_grows_slowly_blames_no_layer_before_the_jump():
    expected = [torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    names = [f"layer {i}" for i in range(6)]
    noise = [0.004, 0.006, 0.009, 0.4, 0.5, 0.5]
    seen = [right * (1 + part) for right, part in zip(expected, noise, strict=True)]
    assert suspect_layer(names, expected, seen, 0.01).startswith(
        "layer 3 is suspect, its output differs by 0.4 of its size"
    )
    assert "all decoder layers agree" in suspect_layer(names[:3], expected[:3], seen[:3], 0.01)
    assert "cannot be compared" in suspect_layer(names, expected, [], 0.01)
