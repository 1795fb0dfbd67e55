"""The checks of `speculative_config` before a start, the engine's arguments, and the metrics of speculation."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generation_helpers import make_settings
from safetensors.torch import save_file

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.config.loading.all_errors import collect_errors
from nemo_rl.models.generation.engine_load import EngineLoad, SpeculationCounts, load_metrics
from nemo_rl.models.generation.vllm.cpu_build import repeat_for_tokens
from nemo_rl.models.generation.vllm.drafting import SpeculationWatch
from nemo_rl.models.generation.vllm.speculation import KNOWN_KEYS, check_speculation, speculation_of
from nemo_rl.utils.errors import ConfigError

pytestmark = pytest.mark.fast

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
MODEL = SimpleNamespace(vocab_size=264, num_nextn_predict_layers=0)


def check(section: Any, device: str = "cpu", model: Any = MODEL, **generation: Any) -> None:
    policy = PolicyConfig.build(
        model_name="nowhere", generation={"vllm_kwargs": {"speculative_config": section}, **generation}
    )
    check_speculation(policy, ClusterConfig(device=device), model)


@pytest.mark.parametrize(
    "section",
    [
        None,
        NGRAM,
        {**NGRAM, "prompt-lookup-max": 4, "prompt_lookup_min": 2},
        {"method": "eagle3", "model": "a/b", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1},
    ],
)
def test_sections_that_pass_on_every_device(section: Any) -> None:
    check(section)
    check(section, "cuda")


@pytest.mark.parametrize(("method", "device", "warns"), [("eagle3", "cpu", False), ("eagle3", "cuda", True)])
def test_the_log_says_where_seeds_do_not_repeat_answers(method, device, warns, caplog) -> None:
    check({"method": method, "model": "a/b", "num_speculative_tokens": 2}, device)
    assert ("on GPUs the same seed may give other answers" in caplog.text) == warns


def test_methods_of_gpus_pass_there_only() -> None:
    for own in ({"method": "medusa", "model": "a/b"}, {"draft_sample_method": "probabilistic"}):
        section = {"method": "eagle3", "model": "a/b", "num_speculative_tokens": 2} | own
        check(section, "cuda")
        with pytest.raises(ConfigError, match="vLLM's CPU build"):
            check(section)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("ngram", "is not a section"),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        ({**NGRAM, "num_speculative_tokens": 0}, "from 1 to 128"),
        ({**NGRAM, "num_speculative_token": 1}, "Did you mean 'num_speculative_tokens'"),
        ({**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "more than prompt_lookup_max=2"),
        ({"num_speculative_tokens": 2}, "method is missing"),
        ({"method": "eagle3", "num_speculative_tokens": 2}, "model is missing"),
        ({"method": "mtp"}, "no layers that predict further tokens"),
        ({**NGRAM, "rejection_sample_method": "synthetic"}, "changes what is sampled"),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 8, 3]]}, "depend on other requests"),
        ({**NGRAM, "max_model_len": 64}, "would stop the proposals"),
        ({**NGRAM, "draft_tensor_parallel_size": 4}, "must be 1"),
    ],
)
def test_wrong_sections_are_refused_before_a_start(section: Any, message: str) -> None:
    for device in ("cpu", "cuda"):
        with pytest.raises(ConfigError, match=message):
            check(section, device)


def test_layers_that_predict_tokens_and_their_old_names_count_as_mtp() -> None:
    model = SimpleNamespace(vocab_size=264, num_nextn_predict_layers=1)
    for section in ({"method": "mtp"}, {"method": "deepseek_mtp", "num_speculative_tokens": 1}):
        check(section, "cuda", model)
        check(section, model=model)


def test_combinations_that_do_not_hold_are_refused() -> None:
    draft = {"method": "draft_model", "model": "a/b", "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match=r"engine\.pipeline_parallel_size=2 is not proven"):
        check(NGRAM, engine={"pipeline_parallel_size": 2})
    with pytest.raises(ConfigError, match="lose its weights when engines sleep"):
        check(draft, "cuda", vllm_cfg={"sleep_level": 2})
    check(NGRAM, "cuda", vllm_cfg={"sleep_level": 2})


@pytest.mark.skipif(importlib.util.find_spec("arctic_inference") is not None, reason="the package is installed")
def test_suffix_decoding_needs_its_package() -> None:
    with pytest.raises(ConfigError, match="arctic-inference"):
        check({"method": "suffix", "num_speculative_tokens": 3})


def test_a_language_model_is_no_eagle_head(tmp_path: Path) -> None:
    section = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 2}
    file = tmp_path / "model.safetensors"
    save_file({"midlayer.input_layernorm.weight": torch.ones(4), "fc.weight": torch.ones(4, 12)}, file)
    check(section)
    save_file({"model.embed_tokens.weight": torch.ones(264, 4)}, file)
    with pytest.raises(ConfigError, match=r"no EAGLE-3 head: .* no tensor fc\.weight\. .* method: draft_model"):
        check(section)


def test_a_draft_model_has_the_same_tokens_and_as_many_positions(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 264, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    section = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    check(section)
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 300, "max_position_embeddings": 128}))
    with pytest.raises(ConfigError, match="has 300 tokens, the policy's model 264") as caught:
        check(section)
    assert "128 positions, fewer than policy.generation.engine.max_model_len=512" in str(caught.value)


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm")
def test_the_known_keys_are_those_of_vllm() -> None:
    code = (
        "import dataclasses; from vllm.config.speculative import SpeculativeConfig as S;"
        "print(' '.join(field.name for field in dataclasses.fields(S)))"
    )
    fields = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
    made_by_vllm = {"draft_load_config", "tensor_parallel_size"}
    made_by_vllm |= {f"{model}_{part}_config" for model in ("target", "draft") for part in ("model", "parallel")}
    assert fields - made_by_vllm == set(KNOWN_KEYS)


def test_files_with_these_keys_load(tmp_path: Path) -> None:
    """As `tools/check_nemo_rl_config.py` reads them."""
    base = Path(__file__).resolve().parents[5] / "examples" / "configs" / "grpo_math_cpu.yaml"
    file = tmp_path / "run.yaml"
    section = "{method: eagle3, model: a/b, num_speculative_tokens: 3, draft_tensor_parallel_size: 1}"
    off = "draft: {enabled: false, model_name: null, loss_weight: 0.1, num_layers: null, aux_layer_indices: null}"
    mtp = "megatron_cfg: {mtp_num_layers: 0, mtp_loss_scaling_factor: 0.0, mtp_detach_heads: false}"
    generation = f"generation: {{vllm_kwargs: {{speculative_config: {section}}}}}"
    file.write_text(f"defaults: {base}\npolicy:\n  {off}\n  {mtp}\n  {generation}\n")
    assert collect_errors(file, "grpo") == []
    assert collect_errors(file, "grpo", ["policy.draft.enabled=true"]) == []
    assert collect_errors(file, "grpo", ["policy.megatron_cfg.mtp_num_layers=1"]) == []


EAGLE = {"method": "eagle3", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (EAGLE, None),
        (EAGLE | {"model": "a/b"}, None),
        (EAGLE | {"model": "c/d"}, "model='c/d' is not policy.draft.model_name='a/b'"),
        (NGRAM, "speculative_config.method=ngram. Write method: eagle3"),
        (None, "speculative_config.method=None. Write method: eagle3"),
    ],
)
def test_a_trained_draft_model_is_the_one_that_proposes(section: Any, message: str | None) -> None:
    draft = {"enabled": True, "model_name": "a/b"}
    generation = {"vllm_kwargs": {"speculative_config": section}, "vllm_cfg": {"sleep_level": 2}}
    policy = PolicyConfig.build(model_name="nowhere", draft=draft, generation=generation)
    if message is None:
        check_speculation(policy, ClusterConfig(device="cpu"), MODEL)
        return
    with pytest.raises(ConfigError) as caught:
        check_speculation(policy, ClusterConfig(device="cpu"), MODEL)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("num_layers", "engine", "message"),
    [
        (1, {}, None),
        (2, {}, "method=mtp with 2 layers in the engines' model, of which the policy sends 1"),
        (1, {"precision": "fp8"}, "float8 weights"),
    ],
)
def test_trained_layers_for_multi_token_prediction_are_those_of_the_engines(num_layers, engine, message) -> None:
    """They may be dropped while the engines sleep, because a sync brings them back."""
    section = {"method": "mtp", "num_speculative_tokens": 1}
    generation = {"vllm_kwargs": {"speculative_config": section}, "vllm_cfg": {"sleep_level": 2}, "engine": engine}
    megatron = {"dtensor_cfg": {"enabled": False}, "megatron_cfg": {"enabled": True, "mtp_num_layers": 1}}
    policy = PolicyConfig.build(model_name="nowhere", generation=generation, **megatron)
    model = SimpleNamespace(vocab_size=264, num_nextn_predict_layers=num_layers)
    if message is None:
        check_speculation(policy, ClusterConfig(device="cpu"), model)
        return
    with pytest.raises(ConfigError, match=message):
        check_speculation(policy, ClusterConfig(device="cpu"), model)


def test_only_proposals_from_weights_make_the_engine_read_files() -> None:
    speculation = speculation_of({"speculative_config": NGRAM})
    assert speculation is not None and not speculation.loads_weights and speculation.num_tokens == 3
    drafted = speculation_of({"speculative_config": {"method": "eagle3", "model": "a/b", "num_speculative_tokens": 2}})
    assert drafted is not None and drafted.loads_weights
    assert speculation_of(make_settings(Path("x"), "vllm").engine_kwargs) is None


def test_counts_are_those_of_the_steps() -> None:
    """Three requests: one accepts two of three proposals, one none of two, and one has no proposals."""
    passed: list[Any] = []
    scheduler = SimpleNamespace(update_from_output=lambda *step: passed.append(step) or "outputs")
    watch = SpeculationWatch(scheduler)
    scheduled = SimpleNamespace(scheduled_spec_decode_tokens={"a": [1, 2, 3], "b": [4, 5]})
    output = SimpleNamespace(req_ids=["a", "b", "c", "d"], sampled_token_ids=[[1, 2, 9], [7], [8], []])
    assert scheduler.update_from_output(scheduled, output) == "outputs" and passed == [(scheduled, output)]
    counts = watch.take()
    assert counts == SpeculationCounts(num_passes=3, num_tokens=5, num_drafts=2, num_proposed=5, num_accepted=2)
    assert watch.take() == SpeculationCounts()
    assert counts.metrics() == {
        "spec_acceptance_rate": 2 / 5,
        "spec_accepted_length": 1.0,
        "spec_tokens_per_pass": 5 / 3,
        "spec_proposed_tokens": 5.0,
    }


def test_counts_of_engines_and_times_add_up() -> None:
    first = EngineLoad(1, 0.5, 8, SpeculationCounts(10, 20, 8, 24, 10))
    later = EngineLoad(2, 0.2, 6, SpeculationCounts(10, 10, 8, 24, 2))
    total = first.plus(later)
    assert total == EngineLoad(3, 0.5, 6, SpeculationCounts(20, 30, 16, 48, 12))
    metrics = load_metrics([total, EngineLoad(0, 0.9, 9)])
    assert metrics["spec_acceptance_rate"] == 12 / 48 and metrics["spec_tokens_per_pass"] == 1.5
    assert "spec_acceptance_rate" not in load_metrics([EngineLoad()]) and load_metrics([]) == {}


def test_the_value_of_a_request_is_repeated_for_its_proposed_tokens() -> None:
    output = torch.full((5,), torch.nan)
    repeat_for_tokens(output, torch.tensor([0.0, 0.7, 0.9]), torch.tensor([2, 2, 5]), 0, 1, max_num_tokens=128)
    assert torch.equal(output, torch.tensor([1.0, 1.0, 0.9, 0.9, 0.9]))
