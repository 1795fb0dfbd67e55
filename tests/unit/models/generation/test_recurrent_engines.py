"""vLLM's recurrent layers on CPUs compute with the weights and states that they should.

Engines are compared with transformers after three syncs that change all weights. Before each comparison all states in
vLLM's cache are NaN, so that a request which starts with another one's state is noticed.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_process import EngineProcess
from generation_helpers import PROMPTS, ask, make_settings, reference_logprobs, save_model
from policy_helpers import policy_config, process_group
from recurrent_looks import alter, continue_with_old_states, recurrent_layers, spoil_states, state_of
from recurrent_models import recurrent_model
from rounded_models import in_bfloat16
from transformers import PreTrainedModel

from nemo_rl.commands.conformance import PROPERTIES, Case, check_property
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.models.huggingface.recurrent import use_configured_time_steps
from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.lanes import Lane
from nemo_rl.weight_sync.transport import TransportSpec
from nemo_rl.weight_sync.verify import SyncReceipt, check_receipts

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]

SPEC = TransportSpec("shared_memory", run_id="test", bucket_size_bytes=100_000)
LONG = [(7 * i) % 250 for i in range(150)]
COMMON = {
    "vocab_size": 264,
    "pad_token_id": 256,
    "bos_token_id": None,
    "eos_token_id": 258,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
DENSE = {"layers_block_type": ["mamba", "attention", "mamba", "mlp"]}
DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_experts_per_tok": 4}
ZAMBA = {"num_attention_heads": 4, "num_key_value_heads": 4}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "nemotron_h": ("nemotron_h", "float32", DENSE),
    "nemotron_h with experts": ("nemotron_h", "float32", {}),
    "falcon_h1": ("falcon_h1", "float32", {}),
    "granitemoehybrid": ("granitemoehybrid", "float32", {"mamba_n_groups": 1}),
    "mamba2": ("mamba2", "float32", {"n_groups": 1, "head_dim": 16, "intermediate_size": 128}),
    "lfm2": ("lfm2", "float32", {}),
    "lfm2_moe": ("lfm2_moe", "float32", {}),
    "lfm2, bfloat16": ("lfm2", "bfloat16", {}),
    "nemotron_h, bfloat16": ("nemotron_h", "bfloat16", DENSE),
    "nemotron_h with experts, bfloat16": ("nemotron_h", "bfloat16", {"num_experts_per_tok": 4}),
    "falcon_h1, bfloat16": ("falcon_h1", "bfloat16", {}),
    "granitemoehybrid, bfloat16": ("granitemoehybrid", "bfloat16", {"mamba_n_groups": 1, "num_experts_per_tok": 4}),
    "qwen3_next, bfloat16": ("qwen3_next", "bfloat16", DELTA),
    "qwen3_5_text, bfloat16": ("qwen3_5_text", "bfloat16", DELTA),
    "qwen3_5_moe_text, bfloat16": ("qwen3_5_moe_text", "bfloat16", DELTA),
}


def model_of(arch: str, fields: dict[str, Any], seed: int) -> PreTrainedModel:
    """Make a model whose weights are all drawn by the seed, and so large that every operation matters."""
    model = recurrent_model(arch, **COMMON | fields)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "conv" in name and name.endswith("weight"):
                parameter.copy_(0.5 * noise)
            elif parameter.dim() > 1:
                parameter.copy_(0.15 * noise)
            else:
                parameter.add_(0.2 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3, generator=generator)
    use_configured_time_steps(model)
    return model


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    made = WeightSender([Lane(SPEC)], rank=0, is_node_leader=True)
    yield made
    made.close()


def synced(
    engines: EngineProcess, sender: WeightSender, folder: Path, model: PreTrainedModel, version: int, precision: str
) -> SyncReceipt:
    """Send a model as a trainer does, and return the engine's receipt."""
    model.save_pretrained(folder)
    config = policy_config(str(folder), precision=precision, sequence_packing={"enabled": False})
    with process_group():
        backend = DTensorBackend(config, torch.device("cpu"), init_optimizer=False, init_reference_model=False)
        return engines.receipt("model", sender, SPEC, backend.held_weights(getattr(torch, precision)), version)


def logprobs(engines: EngineProcess, models: list[PreTrainedModel], seed: int) -> list[torch.Tensor]:
    """Return the log-probabilities of sampled tokens, `[tokens]`, from the engine and from each model."""
    prompts = [*PROMPTS, LONG]
    results = engines.generate("model", [ask(prompt, seed, max_new_tokens=20) for prompt in prompts])
    assert [result.error for result in results] == [None] * len(prompts)
    answers = [result.token_ids.tolist() for result in results]
    found = [[each for result in results for each in result.logprobs.tolist()]]
    for model in models:
        pairs = zip(prompts, answers, strict=True)
        found.append([each for pair in pairs for each in reference_logprobs(model, *pair, SamplingParams())])
    return [torch.tensor(each, dtype=torch.float64) for each in found]


@pytest.mark.parametrize("case", CASES)
def test_the_engine_equals_the_trainer_after_each_sync(case: str, sender: WeightSender, tmp_path: Path) -> None:
    """In bfloat16, the engine's mean distance from float32 is below twice that of transformers in bfloat16."""
    arch, precision, fields = CASES[case]
    save_model(tmp_path, model_of(arch, fields, seed=1))
    with EngineProcess({"model": make_settings(tmp_path, "vllm", precision=precision)}) as engines:
        for version in (1, 2, 3):
            model = model_of(arch, fields, seed=1 + version)
            receipt = synced(engines, sender, tmp_path / f"trained_{version}", model, version, precision)
            assert (receipt.unbound, receipt.altered, receipt.mismatched) == ([], [], [])
            assert engines.look("model", spoil_states) >= 2
            if precision == "float32":
                of_engine, exact = logprobs(engines, [model], version)
                torch.testing.assert_close(of_engine, exact, rtol=0, atol=1e-4)
                continue
            rounded = in_bfloat16(model_of(arch, fields, seed=1 + version))
            of_engine, exact, of_trainer = logprobs(engines, [model, rounded], version)
            errors = [float((each - exact).abs().mean()) for each in (of_engine, of_trainer)]
            assert errors[0] < 2 * errors[1] < 0.3, errors


@pytest.mark.parametrize("case", ["nemotron_h", "nemotron_h, bfloat16", "qwen3_next, bfloat16"])
def test_a_wrong_value_in_a_recurrent_layer_is_reported(case: str, sender: WeightSender, tmp_path: Path) -> None:
    arch, precision, fields = CASES[case]
    save_model(tmp_path, model_of(arch, fields, seed=1))
    kinds = ("A_log", "dt_bias", "conv1d.weight") + (("D", "conv1d.bias") if arch == "nemotron_h" else ())
    with EngineProcess({"model": make_settings(tmp_path, "vllm", precision=precision)}) as engines:
        layer = engines.look("model", recurrent_layers)[-1]
        for version, kind in enumerate(kinds, start=1):
            engines.look("model", alter, layer, kind)
            folder, model = tmp_path / f"trained_{version}", model_of(arch, fields, seed=1 + version)
            receipt = synced(engines, sender, folder, model, version, precision)
            named = f"{layer}.{'A' if kind == 'A_log' and arch == 'nemotron_h' else kind}"
            assert (receipt.unbound, receipt.altered, receipt.mismatched) == ([], [named], [])
            with pytest.raises(WeightSyncError, match=f"the engine holds other values in {named}"):
                check_receipts([receipt], [], version)
            engines.look("model", alter, layer, None)
            assert synced(engines, sender, folder, model, version, precision).altered == []


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineProcess, Case]]:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, model_of("nemotron_h", DENSE, seed=1))
    with EngineProcess({"model": make_settings(folder, "vllm", load_weights=True)}) as engines:
        yield engines, Case(str(folder))


@pytest.mark.parametrize("name", PROPERTIES)
def test_an_engine_with_recurrent_layers_holds(running: tuple[EngineProcess, Case], name: str) -> None:
    engines, case = running
    if name == "death":
        pytest.skip("the engine is used again")
    engines.look("model", check_property, case, name)


def test_an_update_clears_the_states(running: tuple[EngineProcess, Case]) -> None:
    engines, case = running
    engines.generate("model", [ask(PROMPTS[1])])
    assert engines.look("model", state_of) > 0
    engines.look("model", spoil_states)
    engines.look("model", check_property, case, "update")
    assert engines.look("model", state_of) < float("inf"), "NaN of before the update is left"


def test_a_request_that_continues_with_an_old_state_is_noticed(running: tuple[EngineProcess, Case]) -> None:
    engines, case = running
    with pytest.raises(AssertionError, match="ContractError"):
        engines.look("model", continue_with_old_states, case)
    engines.look("model", check_property, case, "update_in_flight")
