"""Compiled decoder layers: the numbers of uncompiled ones, few compilations, and what is refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_checks.plan import CHECKS
from policy_helpers import (
    WeightedNLL,
    policy_config,
    process_group,
    random_batch,
    save_tiny_model,
    tiny_model,
)
from transformers import MixtralConfig, MixtralForCausalLM

from nemo_rl.models.dtensor import parallelize
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.parallelize import compile_layers, wants_compiled
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.utils.errors import ConfigError

CPU = torch.device("cpu")
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 50, "logprob_mb_tokens": 64}}


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet():
    torch.compiler.reset()  # torch keeps what it compiled by function, and stops after a few per function
    yield
    torch.compiler.reset()


class Graphs:
    """A compiler that runs the captured operations unchanged, and counts the captures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.count = 0
        compile_function = torch.compile

        def counted(function: Any, **options: Any) -> Any:
            return compile_function(function, backend=self._take, **options)

        monkeypatch.setattr(torch, "compile", counted)

    def _take(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.count += 1
        return graph.forward


def scores_and_gradients(config, data, worker=None) -> tuple[PolicyWorker, torch.Tensor, dict[str, torch.Tensor]]:
    worker = worker or PolicyWorker(DTensorBackend(config, CPU, init_reference_model=False), config)
    batch = shard_batch(data, 1, logprob_strategy(config), shares_prompts=worker.shares_prompts())
    scores = batch.restore([worker.get_logprobs(batch.data[0], batch.sizes[0])])
    gradients: dict[str, torch.Tensor] = {}

    def keep() -> tuple[float, bool]:
        named = worker.backend.model.hf.named_parameters()
        gradients.update({name: weight.grad.clone() for name, weight in named if weight.grad is not None})
        worker.backend.model.zero_grad()
        return 0.0, True

    worker.backend.clip_and_step = keep
    batch = shard_batch(data, 1, training_strategy(config), shares_prompts=worker.shares_prompts())
    worker.train(batch.data[0], batch.sizes[0], WeightedNLL(), count_valid(data))
    return worker, scores, gradients


def grouped(seed: int):
    """Make rows of which three begin with the same tokens, so that packed rows share them."""
    data = random_batch(rows=6, width=24, seed=seed)
    data["input_lengths"][1:3] = 24
    data["input_ids"][1:3, :9] = data["input_ids"][0, :9]
    data["input_ids"][1:3, 9:] = data["input_ids"][0, 9:].flip(0)
    return data


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"dtensor_cfg": {"activation_checkpointing": True}},
        {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 4, "dropout": 0.0}}},
    ],
    ids=["plain", "recomputed", "lora"],
)
def test_layers_share_compilations_for_all_lengths(values, tmp_path, monkeypatch) -> None:
    name = save_tiny_model(tmp_path, "qwen2", num_hidden_layers=8)
    first, second = grouped(seed=0), grouped(seed=1)
    with process_group():
        _, want, want_gradients = scores_and_gradients(policy_config(name, **PACKED, **values), second)
    graphs = Graphs(monkeypatch)
    values = {"dtensor_cfg": {**values.get("dtensor_cfg", {}), "compile_layers": True}}
    config = policy_config(name, **PACKED, **values)
    with process_group():
        worker, _, _ = scores_and_gradients(config, first)
        compiled = graphs.count
        assert 0 < compiled <= 20, "a few kinds of batches, each with and without gradients; not 4 graphs per layer"
        _, scores, gradients = scores_and_gradients(config, second, worker)
    assert graphs.count <= compiled + 2, "other lengths are no new shapes"
    torch.testing.assert_close(scores, want, rtol=0, atol=1e-5)
    assert gradients.keys() == want_gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, want_gradients[key], rtol=1e-4, atol=1e-5, msg=key)


LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": PACKED,
    "padded, recomputed": {"dtensor_cfg": {"activation_checkpointing": True}},
    "packed, recomputed": {**PACKED, "dtensor_cfg": {"activation_checkpointing": True}},
}


def numbers_of_layers(config, data, token_ids: list[int]) -> dict[str, torch.Tensor]:
    """Return the log-probabilities, the output of each layer, and all gradients, by layer and name."""
    with process_group():
        worker, scores, gradients = scores_and_gradients(config, data)
        names, outputs = worker.layer_outputs(token_ids)
    found = {"log-probabilities": scores, **dict(zip(names, outputs, strict=True))}
    return found | {f"gradient of {name}": gradient for name, gradient in gradients.items()}


def relative_errors(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest difference of each tensor, relative to its largest value."""
    assert got.keys() == want.keys()
    return {
        name: float((got[name] - value).abs().max() / value.abs().max().clamp(min=1e-3)) for name, value in want.items()
    }


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", ["qwen2", "gemma3"])
def test_torchs_compiler_computes_the_same_in_each_layer(shape, layout, tmp_path, record_property) -> None:
    """In float32, on one rank that does not divide layers."""
    name, data, token_ids = save_tiny_model(tmp_path, shape), grouped(seed=0), list(range(3, 20))
    values = LAYOUTS[layout]
    want = numbers_of_layers(policy_config(name, **values), data, token_ids)
    values = {**values, "dtensor_cfg": {**values.get("dtensor_cfg", {}), "compile_layers": True}}
    got = numbers_of_layers(policy_config(name, **values), data, token_ids)
    errors = relative_errors(got, want)
    record_property("largest error", max(errors.values()))
    assert len([each for each in errors if "layers.1" in each]) > 5
    assert not torch.equal(got["log-probabilities"], want["log-probabilities"]), "the layers were not compiled"
    assert max(errors.values()) <= 2e-5, sorted(errors.items(), key=lambda each: -each[1])[:5]


@pytest.mark.parametrize(
    ("asked", "on_gpus", "device", "fits", "compiled"),
    [
        (None, False, "cuda", True, False),
        (None, True, "cuda", True, True),
        (None, True, "cuda", False, False),
        (None, True, "cpu", True, False),
        (True, False, "cuda", True, True),
        (False, True, "cuda", True, False),
    ],
)
def test_one_constant_decides_for_gpus(monkeypatch, asked, on_gpus, device, fits, compiled) -> None:
    monkeypatch.setattr(parallelize, "COMPILES_ON_GPUS", on_gpus)
    monkeypatch.setattr(parallelize, "has_triton", lambda: True)
    model = tiny_model("qwen2")
    assert wants_compiled(asked, model, torch.device(device), fits=fits) == compiled
    if asked is None:
        small = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
        mixture = MixtralForCausalLM(MixtralConfig(**small, num_attention_heads=2, num_key_value_heads=2))
        assert not wants_compiled(asked, mixture, torch.device(device), fits=fits)


def test_the_default_names_the_rows_that_decide_it() -> None:
    source = Path(parallelize.__file__).read_text()
    names = {check.name for check in CHECKS}
    for row in ("compiled layers", "compiled training step"):
        assert row in names and f'"{row}"' in source


def test_experts_and_a_missing_compiler_are_refused(monkeypatch) -> None:
    small = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    with pytest.raises(ConfigError, match="MixtralForCausalLM routes tokens to experts"):
        compile_layers(MixtralForCausalLM(MixtralConfig(**small, **heads)), CPU)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"compile_layers=true needs a C\+\+ compiler"):
        compile_layers(tiny_model("qwen2"), CPU)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"activation_checkpointing": "selective"}, "cannot keep selected outputs"),
        ({"tensor_parallel_size": 2}, "needs tensor_parallel_size=1"),
        ({"expert_parallel_size": 2}, "needs tensor_parallel_size=1 and expert_parallel_size=1"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_the_configuration(values, reason) -> None:
    with pytest.raises(ConfigError, match=reason):
        policy_config("m", dtensor_cfg={"compile_layers": True, **values})
