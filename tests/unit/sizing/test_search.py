"""The search on other machines than a recipe's, for pairs, and for models and clusters that cannot be sized."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_rl.algorithms.setup.memory_forecast import forecast_memory
from nemo_rl.commands.size import proposal
from nemo_rl.commands.size.candidates import Candidate, candidate_of, layouts, update_seconds
from nemo_rl.commands.size.jobs import Job, chosen_gpu, with_values
from nemo_rl.commands.size.proposal import Proposal, described, propose
from nemo_rl.commands.size.report import reasons
from nemo_rl.commands.size.search import EngineChoice, Search
from nemo_rl.config import REPOSITORY_ROOT, MasterConfig, load_config
from nemo_rl.config.loading.algorithms import ALGORITHMS
from nemo_rl.utils.errors import ConfigError

RECIPES = REPOSITORY_ROOT / "examples/configs/recipes/llm"
EXPERTS = "grpo-qwen3-30ba3b-2n8g-megatron"
TEACHER = "distillation-qwen3-32b-to-4b-base-1n8g-fsdp"
ENGINE = "policy.generation.engine"


def described_recipe(name: str, *overrides: str, gpu: str = "h200") -> MasterConfig:
    path: Path = RECIPES / f"{name}.yaml"
    config = load_config(path, overrides, schema=ALGORITHMS[name.split("-")[0]], check=False)
    return described(config, chosen_gpu(gpu, None))


def proposed(config: MasterConfig, gpu: str = "h200") -> Proposal:
    found = propose(config, chosen_gpu(gpu, None))
    assert found is not None and not list(found.config.findings())
    return found


def test_own_sizes_of_engines_do_not_matter_on_other_machines() -> None:
    """Engines of 16 ranks do not fit on four machines with 2 GPUs, and the experts' 16 ranks change with them."""
    sizes = (f"{ENGINE}.tensor_parallel_size=16", f"{ENGINE}.expert_parallel_size=16")
    config = described_recipe(EXPERTS, "cluster.num_nodes=4", "cluster.gpus_per_node=2", *sizes)
    assert any("16 ranks of an engine" in text for text in config.findings())
    values = proposed(config).values
    assert values[f"{ENGINE}.tensor_parallel_size"] == values[f"{ENGINE}.expert_parallel_size"] <= 2


def test_own_sizes_of_the_policy_do_not_stop_the_search_for_the_teacher() -> None:
    config = described_recipe(TEACHER, "policy.dtensor_cfg.tensor_parallel_size=16")
    assert list(config.findings())
    assert proposed(config).values["policy.dtensor_cfg.tensor_parallel_size"] <= 8


def test_pairs_without_packing_take_the_memory_of_two_rows() -> None:
    """A pair at a time is as much as microbatches of 2 x length tokens, in the search and in the forecast."""
    packed = described_recipe("dpo-llama3.1-8b-instruct-1n8g-fsdp")
    length = packed.policy.max_total_sequence_length
    packed = with_values(packed, {"policy.sequence_packing.train_mb_tokens": 2 * length})
    sizes = {"policy.sequence_packing.enabled": False, "policy.train_micro_batch_size": 1}
    unpacked = with_values(packed, sizes)
    gpu = chosen_gpu("h100", None)
    forecasts = [forecast_memory(each, gpu.memory_gib * 2**30).groups["policy"] for each in (packed, unpacked)]
    assert forecasts[0].moments["training"] == forecasts[1].moments["training"]
    jobs = [Job(each, "policy", gpu) for each in (packed, unpacked)]
    assert jobs[0].plan(jobs[0].section) == jobs[1].plan(jobs[1].section)
    assert candidate_of(jobs[0]).rows == candidate_of(jobs[1]).rows == 2


def test_a_model_that_cannot_be_traced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(described_recipe("sft-llama3.1-8b-1n8g-fsdp"), "policy", chosen_gpu("h100", None))
    monkeypatch.setitem(job.__dict__, "trace", replace(job.trace, activations=[]))
    with pytest.raises(ConfigError, match="activations are unknown"):
        Search.of(job)


def test_a_model_without_attention_heads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(described_recipe("sft-llama3.1-8b-1n8g-fsdp"), "policy", chosen_gpu("h100", None))
    monkeypatch.setitem(job.__dict__, "text", object())
    with pytest.raises(ConfigError, match="no attention as other models have"):
        Search.of(job)


def test_a_policy_without_gpus_has_no_layouts_and_a_reason() -> None:
    keys = ("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=8")
    job = Job(described_recipe("grpo-llama3.1-8b-instruct-1n8g-fsdp", *keys), "policy", chosen_gpu("h100", None))
    assert job.ranks == 0 and not list(layouts(job))
    assert "leave it no GPU" in Search.of(job).refusal()


def test_a_teacher_with_its_own_gpus_leaves_the_others_to_policy_and_engines() -> None:
    keys = ("teacher.colocated.enabled=false", "teacher.colocated.resources.gpus_per_node=4")
    config = described_recipe(TEACHER, *keys)
    assert [Job(config, name, chosen_gpu("h200", None)).per_node for name in ("policy", "teacher")] == [4, 4]
    engine = proposed(config).engine
    assert engine is not None and engine.engines * engine.tensor * engine.stages == 4


def test_no_stage_of_megatron_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 18 layers each of 8 stages would have 3, and the last one -3."""
    job = Job(described_recipe("sft-deepseek-v3-32n8g-megatron"), "policy", chosen_gpu("h200", None))
    monkeypatch.setitem(job.__dict__, "trace", replace(job.trace, layers=job.trace.layers[:18]))
    assert {layout.pp for layout in layouts(job)} == {1, 2, 4}


def test_adapters_take_two_passes_and_no_exchange_of_frozen_weights() -> None:
    gpu = chosen_gpu("h100", None)
    name = "sft-llama3.1-8b-1n8g-fsdp"
    whole = Job(described_recipe(name), "policy", gpu)
    keys = {"policy.dtensor_cfg.lora_cfg.enabled": True}
    adapters = Job(with_values(whole.config, keys), "policy", gpu)
    layout = next(each for each in layouts(whole) if each.dp_shard == 8)
    for recompute, share in {"none": 2 / 3, "full": 3 / 4}.items():
        candidate = Candidate(layout, "full" if recompute == "full" else "none", False, 1)
        seconds = [update_seconds(job, candidate).compute for job in (whole, adapters)]
        assert seconds[1] / seconds[0] == pytest.approx(share)
    offload = [update_seconds(job, Candidate(layout, "none", True, 1)).offload for job in (whole, adapters)]
    assert offload[1] < offload[0]


def test_offload_tells_the_host_memory_of_a_machine() -> None:
    """Weights, gradients and two moments of 8.03e9 parameters, in float32, whatever the number of ranks."""
    config = described_recipe("sft-llama3.1-8b-1n8g-fsdp", "cluster.gpus_per_node=1")
    found = proposed(config)
    assert found.models["policy"].candidate.offload
    sentence = next(each.sentence for each in reasons(found) if each.what == "CPU offload")
    held = re.search(r"the 1 ranks of a machine keep ([\d.]+) GiB", sentence)
    assert held is not None and float(held[1]) == pytest.approx(4 * 4 * 8.03e9 / 2**30, rel=0.01)


def test_what_backends_refuse_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise ConfigError("the device has no such kernels")

    monkeypatch.setattr(proposal, "check_backends", refuse)
    monkeypatch.setattr(proposal, "_MOST_TRIED", 3)
    refused: list[str] = []
    assert propose(described_recipe("sft-llama3.1-8b-1n8g-fsdp"), chosen_gpu("h200", None), refused) is None
    assert refused == ["the device has no such kernels"] * 6, "3 sizes, with 95 % and all of the memory"


def test_a_layout_without_room_for_engines_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def no_room(job: Job, config: MasterConfig, reserved: float) -> list[EngineChoice]:
        own = candidate_of(Job(config, "policy", job.gpu))
        asked.append((own.layout, own.offload))
        return []

    monkeypatch.setattr(proposal, "engine_choices", no_room)
    config = described_recipe("grpo-llama3.1-8b-instruct-1n8g-fsdp", "cluster.gpus_per_node=4")
    assert propose(config, chosen_gpu("h200", None)) is None
    assert len(asked) > 5 and max(Counter(asked).values()) == 2, "with 95 % and with all of the memory"
