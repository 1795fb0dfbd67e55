"""Hugging Face -> Megatron Core -> Hugging Face on real models and meshes, and against Hugging Face's own logits."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import conversion_models as models
import pytest
import torch
from policy_helpers import run_ranks
from safetensors.torch import load_file, save_file

from nemo_rl.models.megatron.conversion.layer_rules import FAMILIES
from nemo_rl.models.megatron.conversion.layouts import Grouped, Segment
from nemo_rl.utils.errors import CheckpointError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed (extra mcore)"
)
RANKS = 4
MESHES: dict[str, dict[str, int]] = {
    "single": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "pp2_vpp2": {"pp": 2, "vpp": 2},
    "ep2": {"ep": 2},
    "tp2_ep2": {"tp": 2, "ep": 2},
    "tp2_ep2_etp2": {"tp": 2, "ep": 2, "etp": 2},
    "tp2_pp2_ep2": {"tp": 2, "pp": 2, "ep": 2},
    "tp4": {"tp": 4},  # more ranks than key heads
}
MIXTURES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
"""Families that expert parallelism divides."""
UNDIVIDED_EXPERTS = ("gpt_oss",)
"""Megatron Core refuses expert-tensor parallelism for experts with biases."""
CASES = [
    (mesh, family)
    for mesh, sizes in MESHES.items()
    for family in FAMILIES
    if not ("ep" in sizes and family not in MIXTURES) and not ("etp" in sizes and family in UNDIVIDED_EXPERTS)
]
WITH_LOGITS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
"""Families whose forward pass the test's own modules have."""
CPU = torch.device("cpu")


def _same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> str:
    """Names of tensors that differ by presence, dtype or any bit."""
    names = got.keys() | want.keys()
    both = got.keys() & want.keys()
    differ = {name for name in both if got[name].dtype != want[name].dtype or not torch.equal(got[name], want[name])}
    return ", ".join(sorted(names - both | differ))


def _round_trips(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """`{mesh/family: what differs}`, and what the other tests ask for in meshes that are up."""
    results: dict[str, Any] = {}
    for mesh, sizes in MESHES.items():
        with models.parallel_state(rank, **sizes):
            for family in (family for name, family in CASES if name == mesh):
                results[f"{mesh}/{family}"] = _round_trip(folder / family, sizes)
            if mesh == "single":
                results |= _in_one_piece(folder)
            if mesh == "tp2_pp2_ep2":
                results |= _divided(folder, sizes)
    return results


def _round_trip(folder: Path, sizes: dict[str, int]) -> str:
    from nemo_rl.models.megatron.conversion.exporter import iterate_hf_weights
    from nemo_rl.models.megatron.conversion.importer import load_huggingface

    config, want = _config(folder), load_file(folder / "model.safetensors")
    chunks = models.chunks_of(config, want["model.embed_tokens.weight"].dtype, sizes.get("vpp"))
    load_huggingface(chunks, config, folder)
    return _same({name: tensor.clone() for name, tensor in iterate_hf_weights(chunks, config, device=CPU)}, want)


def _in_one_piece(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {f"logits/{family}": _logit_error(folder / family) for family in WITH_LOGITS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Grouped, "segments", _two_query_heads_swapped(Grouped.segments))
        results["swapped/round trip"] = _round_trip(folder / "llama", {})
        results["swapped/logits"] = _logit_error(folder / "llama")
    results["gpt_oss experts"] = _gpt_oss_expert_error(folder / "gpt_oss")
    return results


def _logit_error(folder: Path) -> float:
    from nemo_rl.models.megatron.conversion.importer import load_huggingface

    config = _config(folder)
    chunks = models.chunks_of(config)
    load_huggingface(chunks, config, folder)
    ids = torch.randint(0, config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        want = models.random_huggingface(config)(input_ids=ids).logits
        return (models.logits(chunks[0], ids) - want).abs().max().item()


def _two_query_heads_swapped(segments: Any) -> Any:
    """A layout that puts heads 0 and 1 into each other's place, in both directions."""

    def swapped(self: Grouped, *args: int) -> Iterator[Segment]:
        first, *rest = segments(self, *args)
        middle = first.start + self.head_dim
        yield replace(first, start=middle)
        yield replace(first, stop=middle)
        yield from rest

    return swapped


def _gpt_oss_expert_error(folder: Path) -> float:
    """Expert 2 of layer 1 by its formula, on Megatron Core's weights, against Hugging Face's module on all experts."""
    from nemo_rl.models.megatron.conversion.importer import load_huggingface

    config = _config(folder)
    chunks = models.chunks_of(config)
    load_huggingface(chunks, config, folder)
    expert = chunks[0].decoder.layers[1].mlp.experts.local_experts[2]
    x = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        module = models.random_huggingface(config).model.layers[1].mlp.experts
        want = module(x, torch.full((3, 1), 2), torch.ones(3, 1))
        gate, up = (x @ expert.linear_fc1.weight.t() + expert.linear_fc1.bias).chunk(2, -1)
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        hidden = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        return (hidden @ expert.linear_fc2.weight.t() + expert.linear_fc2.bias - want).abs().max().item()


def _divided(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """What only shows where a model is divided in every way."""
    from nemo_rl.models.megatron.conversion.exporter import iterate_hf_weights
    from nemo_rl.models.megatron.conversion.importer import load_huggingface

    results: dict[str, Any] = {"bfloat16": _round_trip(folder / "bfloat16", sizes)}
    config = _config(folder / "deepseek_v3")
    chunks = models.chunks_of(config)
    load_huggingface(chunks, config, folder / "deepseek_v3")
    want = load_file(folder / "deepseek_v3/model.safetensors")
    sent = {name: t.clone() for name, t in iterate_hf_weights(chunks, config, device=CPU, dtype=torch.bfloat16)}
    kept = "e_score_correction_bias"
    results["sent in bfloat16"] = _same(sent, {n: t if kept in n else t.bfloat16() for n, t in want.items()})
    results["order"] = list(sent)
    results["stacks"] = _stacks_as_in_memory(folder)
    results["another model"] = _refusal(folder)
    return results


def _stacks_as_in_memory(folder: Path) -> str:
    """Files with transformers' names in memory, one tensor for all experts, fill the same parameters."""
    from nemo_rl.models.megatron.conversion.importer import load_huggingface

    config = _config(folder / "qwen3_moe")
    filled = []
    for name in ("qwen3_moe", "qwen3_moe_stacks"):
        chunks = models.chunks_of(config)
        load_huggingface(chunks, config, folder / name)
        filled.append(dict(chunks[0].named_parameters()))
    return _same(*filled)


def _refusal(folder: Path) -> str:
    """A model that lacks a dense layer's weights, which its second stage does not know, is refused on every rank."""
    from nemo_rl.models.megatron.conversion.importer import load_huggingface

    config = _config(folder / "qwen3_moe")
    config.mlp_only_layers = []
    chunks = models.chunks_of(config)
    with pytest.raises(CheckpointError) as caught:
        load_huggingface(chunks, _config(folder / "qwen3_moe"), folder / "qwen3_moe")
    return str(caught.value)


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        models.save(models.random_huggingface(models.config_of(family)), folder / family)
    models.save(models.random_huggingface(models.config_of("deepseek_v3"), torch.bfloat16), folder / "bfloat16")
    stacked = models.random_huggingface(models.config_of("qwen3_moe"))
    (folder / "qwen3_moe_stacks").mkdir()
    save_file(stacked.state_dict(), folder / "qwen3_moe_stacks/model.safetensors")
    return run_ranks(_round_trips, RANKS, folder)


@pytest.mark.parametrize(("mesh", "family"), CASES)
def test_a_round_trip_gives_every_tensor_back_bit_for_bit_on_every_rank(results, mesh, family) -> None:
    assert [rank[f"{mesh}/{family}"] for rank in results] == [""] * RANKS


@pytest.mark.parametrize("family", WITH_LOGITS)
def test_a_loaded_model_answers_as_hugging_face_does(results, family) -> None:
    assert max(rank[f"logits/{family}"] for rank in results) < 2e-6


def test_the_comparison_of_logits_sees_two_swapped_heads_that_a_round_trip_does_not(results) -> None:
    assert results[0]["swapped/round trip"] == ""
    assert results[0]["swapped/logits"] > 1e-3


def test_gate_and_up_of_interleaved_experts_are_told_apart(results) -> None:
    assert max(rank["gpt_oss experts"] for rank in results) < 1e-6


def test_bfloat16_stays_bfloat16(results) -> None:
    assert [rank["bfloat16"] for rank in results] == [""] * RANKS


def test_weights_are_sent_in_the_receivers_format_but_for_correction_biases(results) -> None:
    assert [rank["sent in bfloat16"] for rank in results] == [""] * RANKS


def test_all_ranks_send_in_the_same_order(results) -> None:
    assert all(rank["order"] == results[0]["order"] for rank in results)


def test_files_with_all_experts_in_one_tensor_fill_the_same_parameters(results) -> None:
    assert [rank["stacks"] for rank in results] == [""] * RANKS


def test_a_model_that_its_configuration_does_not_describe_is_refused_by_name_on_every_rank(results) -> None:
    for rank in results:
        assert (
            "no Hugging Face name: decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"
            in rank["another model"]
        )
        assert "lacks: decoder.layers.0.mlp.linear_fc1.weight" in rank["another model"]
